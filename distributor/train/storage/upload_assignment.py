"""Assigns each file that several ranks report to one rank, which uploads it.

The ranks of a node often save into one folder, which each of them then reports.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from distributor import runtime
from distributor.train.runtime.store_channel import StoreChannel
from distributor.train.storage.manifest import RESERVED

Assignment = Callable[[Mapping[str, str]], Iterator[tuple[str, bool]]]
"""Selects, from files by name and identity, those that this rank processes, one at a time.

Each comes with whether this rank uploads it. If not, a different file of the same name is uploaded
by another rank, and this rank only computes the checksum, so that the two can be compared.
"""


def assign_all(files: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Assign all files to this rank."""
    for name in files:
        yield name, True


def assign_among_ranks(channel: StoreChannel, key: str, of_rank_0: Mapping[str, str]) -> Assignment:
    """Return an assignment in which the rank that first claims a file uploads it.

    Each rank begins at another file. Files that another rank has already claimed are skipped. Of
    different files of one name, that of rank 0 is uploaded.

    Parameters
    ----------
    channel : StoreChannel
        The channel through which ranks claim files.
    key : str
        A key prefix of this report.
    of_rank_0 : mapping of str to str
        The identities of rank 0's files.
    """

    def assign(files: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
        names = list(files)
        first = len(names) * channel.rank // channel.size
        for name in [*names[first:], *names[:first]]:
            if of_rank_0.get(name, files[name]) != files[name]:
                yield name, False
                continue
            own_claim = f"{channel.rank} {files[name]}"
            claim = channel.set_first(f"{key}/{name!a}", own_claim)
            if claim == own_claim:
                yield name, True
            elif claim.partition(" ")[2] != files[name]:
                yield name, False

    return assign


def files_of(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Return the files in a folder that ranks report, by their path in it."""
    root = Path(folder)
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    files = {str(path.relative_to(root)): path for path in paths}
    return {name: path for name, path in files.items() if name not in RESERVED}


def identities_of(files: Mapping[str, Path]) -> dict[str, str]:
    """Return a text for each file that identifies it, and its version, among those of all nodes."""
    return {name: file_identity(file) for name, file in files.items()}


def file_identity(file: Path) -> str:
    """Return a text that identifies a file, and its version, among those of all nodes."""
    status = file.stat()
    return f"{runtime.get_node_rank()} {status.st_dev} {status.st_ino} {status.st_mtime_ns}"
