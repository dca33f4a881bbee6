"""Checks that the files of a checkpoint are in storage as they were written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pyarrow.fs as pafs

from distributor.errors import DistributorError
from distributor.filesystems import native
from distributor.train.checkpoint import METADATA
from distributor.train.storage.crc32 import combine
from distributor.train.storage.manifest import StoredFile
from distributor.train.storage.upload import CHUNK, checksum_of_range

READERS = 8
"""The number of pieces that are read at a time: an object store delivers a single one slowly."""
PIECE = 64 * CHUNK
"""Bytes of a file that are read in one piece."""


class Piece(NamedTuple):
    """Some bytes of a file."""

    file: StoredFile
    start: int
    stop: int


class Checksum(NamedTuple):
    """The CRC-32 of the next bytes of a file."""

    name: str
    size: int
    checksum: int


class Damaged(Exception):
    """A file of a checkpoint is damaged; the message says which, and how."""


def read_share(
    filesystem: pafs.FileSystem, folder: str, files: Sequence[StoredFile], rank: int, size: int
) -> list[Checksum]:
    """Read a rank's share of a checkpoint: the same number of bytes for each rank.

    Parameters
    ----------
    filesystem : pyarrow.fs.FileSystem
        The storage.
    folder : str
        The checkpoint's folder.
    files : sequence of StoredFile
        What its manifest says of the files. The metadata file is skipped: users may update it.
    rank, size : int
        This rank, and the number of ranks.

    Returns
    -------
    list of Checksum
        Those of files that this rank reads in part, for `check_parts`.

    Raises
    ------
    Damaged
        If a file is missing, or is not what was written.
    """
    pieces = list(_pieces(files, rank, size))
    with ThreadPoolExecutor(READERS, "readers") as readers:
        checksums = list(readers.map(lambda piece: _read(filesystem, folder, piece), pieces))
    joined = _join(checksums)
    sizes = {file.name: file.size for file in files}
    check_parts(folder, files, [each for each in joined.values() if each.size == sizes[each.name]])
    return [each for each in joined.values() if each.size < sizes[each.name]]


def check_parts(folder: str, files: Sequence[StoredFile], parts: Iterable[Checksum]) -> None:
    """Check the files of which these are all parts, in the order of their bytes.

    Raises
    ------
    Damaged
        If a file is not what was written.
    """
    joined = _join(parts)
    for file in files:
        found = joined.get(file.name)
        if found is not None and found[1:] != (file.size, file.checksum):
            raise Damaged(f"{folder}/{file.name} has been modified")


def find_damage(
    filesystem: pafs.FileSystem, folder: str, files: Sequence[StoredFile]
) -> str | None:
    """Read files of a checkpoint completely, and describe the first that is damaged.

    Parameters
    ----------
    filesystem, folder, files
        As for `read_share`.

    Returns
    -------
    str or None
        What is wrong with which file; None if nothing is.
    """
    try:
        read_share(filesystem, folder, files, rank=0, size=1)
    except Damaged as damage:
        return str(damage)
    return None


def _pieces(files: Sequence[StoredFile], rank: int, size: int) -> Iterator[Piece]:
    """Divide the bytes of all files, one after another, among the ranks and into pieces."""
    files = [file for file in files if file.name != METADATA]
    total = sum(file.size for file in files)
    start, stop = (total * each // size // CHUNK * CHUNK for each in (rank, rank + 1))
    if rank == size - 1:
        stop = total + 1  # an empty file at the end, too
    offset = 0
    for file in files:
        first, last = max(start - offset, 0), min(stop - offset, file.size)
        if first < last:
            for begin in range(first, last, PIECE):
                yield Piece(file, begin, min(begin + PIECE, last))
        elif not file.size and start <= offset < stop:
            yield Piece(file, 0, 0)
        offset += file.size


def _read(filesystem: pafs.FileSystem, folder: str, piece: Piece) -> Checksum:
    file, path = piece.file, f"{folder}/{piece.file.name}"
    info = filesystem.get_file_info(native(filesystem, path))
    if info.type != pafs.FileType.File:
        raise Damaged(f"{path} is missing")
    if info.size != file.size:
        raise Damaged(f"{path} has {info.size:,} bytes instead of {file.size:,}")
    checksum = checksum_of_range(filesystem, path, piece.start, piece.stop)
    return Checksum(file.name, piece.stop - piece.start, checksum)


def _join(parts: Iterable[Checksum]) -> dict[str, Checksum]:
    """Return one checksum for the parts of each file, which are in the order of their bytes."""
    joined: dict[str, Checksum] = {}
    for part in parts:
        before = joined.get(part.name, Checksum(part.name, 0, 0))
        checksum = combine(before.checksum, part.checksum, part.size)
        joined[part.name] = Checksum(part.name, before.size + part.size, checksum)
    return joined


def check_sizes(filesystem: pafs.FileSystem, folder: str, files: Iterable[StoredFile]) -> None:
    """Check that all files of a checkpoint are in storage with the sizes that were written.

    Raises
    ------
    DistributorError
        If one is missing, or has another size.
    """
    sizes = {f"{folder}/{file.name}": file.size for file in files}
    infos = filesystem.get_file_info([native(filesystem, path) for path in sizes])
    for (path, size), info in zip(sizes.items(), infos, strict=True):
        is_file = info.type == pafs.FileType.File
        if not is_file or info.size != size:
            found = f"has {info.size:,}" if is_file else "does not exist"
            run, _, checkpoint = folder.rpartition("/")
            raise DistributorError(
                f"The checkpoint {checkpoint} is incomplete: {size:,} bytes were "
                f"written to {path}, which {found}. Check that all nodes see the same storage "
                f"at {run}."
            )
