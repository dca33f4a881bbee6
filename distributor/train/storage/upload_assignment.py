"""Assigns each file that several ranks report to one rank, which uploads it.

The ranks of a node often save into one folder, which each of them then reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from distributor import runtime
from distributor.train.runtime.store_channel import StoreChannel

Assignment = Callable[[Mapping[str, str]], Iterator[tuple[str, bool]]]
"""Selects, from files by name and identity, those that this rank processes, one at a time.

Each comes with whether this rank uploads it. If not, another rank uploads a different file of the
same name, and this rank only computes the checksum, so that the two can be compared.
"""


def assign_all(files: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Assign all files to this rank."""
    for name in files:
        yield name, True


def assign_among_ranks(channel: StoreChannel, key: str) -> Assignment:
    """Return an assignment in which the rank that first claims a file uploads it.

    Each rank begins at another file. Files that another rank has already claimed are skipped.

    Parameters
    ----------
    channel : StoreChannel
        The channel through which ranks claim files.
    key : str
        A key prefix of this report.
    """

    def assign(files: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
        names = list(files)
        first = len(names) * channel.rank // channel.size
        for name in [*names[first:], *names[:first]]:
            own_claim = f"{channel.rank} {files[name]}"
            claim = channel.set_first(f"{key}/{name}", own_claim)
            if claim == own_claim:
                yield name, True
            elif claim.partition(" ")[2] != files[name]:
                yield name, False

    return assign


def file_identity(file: Path) -> str:
    """Return a text that identifies a file, and its version, among those of all nodes."""
    status = file.stat()
    return f"{runtime.get_node_rank()} {status.st_dev} {status.st_ino} {status.st_mtime_ns}"
