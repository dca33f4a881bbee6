"""Checks that the files of a checkpoint are in storage as they were written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow.fs as pafs

from distributor.errors import DistributorError
from distributor.train.checkpoint import METADATA
from distributor.train.storage.manifest import StoredFile
from distributor.train.storage.upload import size_and_checksum

READERS = 8
"""The number of files that are read at a time: an object store delivers a single one slowly."""


def find_damage(
    filesystem: pafs.FileSystem, folder: str, files: Sequence[StoredFile]
) -> str | None:
    """Read files of a checkpoint completely, and describe the first that is damaged.

    Parameters
    ----------
    filesystem : pyarrow.fs.FileSystem
        The storage.
    folder : str
        The checkpoint's folder.
    files : sequence of StoredFile
        What its manifest says of the files. The metadata file is skipped: users may update it.

    Returns
    -------
    str or None
        What is wrong with which file; None if nothing is.
    """
    files = [file for file in files if file.name != METADATA]

    def describe(file: StoredFile) -> str | None:
        return _describe_damage(filesystem, f"{folder}/{file.name}", file)

    with ThreadPoolExecutor(READERS, "readers") as readers:
        return next(filter(None, readers.map(describe, files)), None)


def _describe_damage(filesystem: pafs.FileSystem, path: str, file: StoredFile) -> str | None:
    info = filesystem.get_file_info(path)
    if info.type != pafs.FileType.File:
        return f"{path} is missing"
    if info.size != file.size:
        return f"{path} has {info.size:,} bytes instead of {file.size:,}"
    if size_and_checksum(filesystem, path) != (file.size, file.checksum):
        return f"{path} has been modified"
    return None


def check_sizes(filesystem: pafs.FileSystem, folder: str, files: Iterable[StoredFile]) -> None:
    """Check that all files of a checkpoint are in storage with the sizes that were written.

    Raises
    ------
    DistributorError
        If one is missing, or has another size.
    """
    sizes = {f"{folder}/{file.name}": file.size for file in files}
    for info in filesystem.get_file_info(list(sizes)):
        is_file = info.type == pafs.FileType.File
        if not is_file or info.size != sizes[info.path]:
            found = f"has {info.size:,}" if is_file else "does not exist"
            run, _, checkpoint = folder.rpartition("/")
            raise DistributorError(
                f"The checkpoint {checkpoint} is incomplete: {sizes[info.path]:,} bytes were "
                f"written to {info.path}, which {found}. Check that all nodes see the same storage "
                f"at {run}."
            )
