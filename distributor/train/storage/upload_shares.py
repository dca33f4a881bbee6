"""Assigns each file that several ranks report to one rank, which uploads it.

The ranks of a node often save into one folder, which each of them then reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from distributor import runtime
from distributor.train.runtime.store_channel import StoreChannel

Share = Callable[[Mapping[str, str]], Iterator[tuple[str, bool]]]
"""Of files, by name and identity, those that a rank has to look after, each as its turn comes.

With each comes whether it is this rank's to bring. Where it is not, another rank brings a file of
its own by that name, and this one is there to be compared.
"""


def everything(files: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Share with nobody."""
    for name in files:
        yield name, True


def shared(channel: StoreChannel, about: str) -> Share:
    """Share with all ranks: who gets to a file first brings it, and each begins elsewhere."""

    def share(files: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
        names = list(files)
        first = len(names) * channel.rank // channel.size
        for name in [*names[first:], *names[:first]]:
            mine = f"{channel.rank} {files[name]}"
            claimed = channel.set_first(f"{about}/{name}", mine)
            if claimed == mine:
                yield name, True
            elif claimed.partition(" ")[2] != files[name]:
                yield name, False

    return share


def identity_of(file: Path) -> str:
    """Tell a file of this node from any other."""
    status = file.stat()
    return f"{runtime.get_node_rank()} {status.st_dev} {status.st_ino} {status.st_mtime_ns}"
