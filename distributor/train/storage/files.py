"""The files of a checkpoint: uploaded in one pass, and checked later by their checksums."""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.fs as pafs

from distributor import runtime
from distributor.core.files import atomic_path
from distributor.errors import DistributorError
from distributor.filesystems import is_local, native
from distributor.train.storage.checkpoint import METADATA, Checkpoint
from distributor.train.storage.manifest import RESERVED, StoredFile

CHUNK = 1024 * 1024
"""Bytes that are read and written at a time. With twice as many, Linux took four times as long."""
COPY_BYTES = 1024 * CHUNK
"""Bytes that the kernel is asked to copy at a time."""
READ_AHEAD = 16 * CHUNK
"""Bytes that are requested from remote storage at a time: each request costs a round trip."""
READERS = 8
"""The number of pieces that are read at a time: an object store delivers a single one slowly."""
PIECE = 64 * CHUNK
"""Bytes of a file that are read in one piece."""
PARTIAL = ".partial"
"""The suffix of a file that `break_hardlink` is copying."""


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
    status = file.stat()
    return f"{runtime.get_node_rank()} {status.st_dev} {status.st_ino} {status.st_mtime_ns}"


# Uploads


def upload_file(
    file: Path, filesystem: pafs.FileSystem, target: str, *, keep: bool
) -> tuple[int, int]:
    """Upload a file of this machine, and return its size in bytes and its CRC-32.

    With `keep`, it may still be used afterwards. It is copied then, because the next save may
    overwrite it, which must not change what is stored. Otherwise, if storage is on the same disk,
    it is hard-linked, and nobody may write to it until it is removed.
    """
    if not is_local(filesystem):
        with file.open("rb") as source, filesystem.open_output_stream(target) as sink:
            return _transfer(source, sink)
    Path(target).unlink(missing_ok=True)  # left by a rank that was killed; perhaps a link to `file`
    # A link saves writing the file: 0.8 s instead of 2.4 s for a report of 1 GB on a cloud disk.
    if keep or not _hardlink(file, target):
        _copy(file, target)
    return size_and_checksum(filesystem, str(file))


def size_and_checksum(filesystem: pafs.FileSystem, path: str) -> tuple[int, int]:
    """Read a file, and return its size in bytes and its CRC-32."""
    buffer_size = None if is_local(filesystem) else READ_AHEAD
    with filesystem.open_input_stream(native(filesystem, path), buffer_size=buffer_size) as stream:
        return _transfer(stream)


def _transfer(source: Any, sink: Any = None) -> tuple[int, int]:
    """Read a stream, write it to another if there is one, and return its size and CRC-32."""
    size = checksum = 0
    buffer = memoryview(bytearray(CHUNK))
    while count := source.readinto(buffer):
        chunk = buffer[:count]
        if sink is not None:
            sink.write(chunk)
        size, checksum = size + count, zlib.crc32(chunk, checksum)
    return size, checksum


def _hardlink(file: Path, target: str) -> bool:
    """Make a hard link if that is possible and safe; return whether it was made."""
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        return False  # it could be modified later through another name
    try:
        os.link(file, target)
    except OSError:  # another disk, or a file system without hard links
        return False
    return True


def _copy(file: Path, target: str | Path) -> None:
    # The kernel copies. XFS, Btrfs and NFS only record that both files share their content.
    with file.open("rb", buffering=0) as source, open(target, "wb") as sink:
        try:
            while os.copy_file_range(source.fileno(), sink.fileno(), COPY_BYTES):
                pass
        except (AttributeError, OSError):  # not on this system, or not between these two disks
            _transfer(source, sink)  # continues at the offset at which the kernel stopped


def break_hardlinks(checkpoint: Checkpoint, files: Iterable[StoredFile]) -> None:
    """Replace files on this machine by copies if they have other names.

    A rank that is killed before it has removed its local folder leaves such names, through which
    the next attempt could write into the checkpoint.
    """
    if not is_local(checkpoint.filesystem):
        return
    for path in (f"{checkpoint.path}/{file.name}" for file in files):
        if os.stat(path).st_nlink == 1:
            continue
        try:
            with atomic_path(path, partial=f"{path}{PARTIAL}") as partial:
                _copy(Path(path), partial)
        except OSError as error:  # for example, the disk is full; the file is complete nevertheless
            print(f"distributor: {path} stays a hard link of another file: {error}.", flush=True)


# Checks


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


def check_sizes(checkpoint: Checkpoint, files: Iterable[StoredFile]) -> None:
    """Check that all files of a checkpoint are in storage with the sizes that were written."""
    filesystem, folder = checkpoint.filesystem, checkpoint.path
    sizes = {f"{folder}/{file.name}": file.size for file in files}
    infos = filesystem.get_file_info([native(filesystem, path) for path in sizes])
    for (path, size), info in zip(sizes.items(), infos, strict=True):
        is_file = info.type == pafs.FileType.File
        if not is_file or info.size != size:
            found = f"has {info.size:,}" if is_file else "does not exist"
            run, _, name = folder.rpartition("/")
            raise DistributorError(
                f"The checkpoint {name} is incomplete: {size:,} bytes were "
                f"written to {path}, which {found}. Check that all nodes see the same storage "
                f"at {run}."
            )


def read_share(
    checkpoint: Checkpoint, files: Sequence[StoredFile], rank: int, size: int
) -> list[Checksum]:
    """Read a rank's share of a checkpoint: the same number of bytes for each of `size` ranks.

    `files` is what the manifest says of them. Returns the checksums of files that this rank reads
    in part, for `check_parts`. Raises `Damaged` if a file is missing, or is not what was written.
    """
    pieces = list(_pieces(files, rank, size))
    with ThreadPoolExecutor(READERS, "readers") as readers:
        checksums = list(readers.map(lambda piece: _read(checkpoint, piece), pieces))
    joined = _join(checksums)
    sizes = {file.name: file.size for file in files}
    whole = [each for each in joined.values() if each.size == sizes[each.name]]
    check_parts(checkpoint, files, whole)
    return [each for each in joined.values() if each.size < sizes[each.name]]


def check_parts(
    checkpoint: Checkpoint, files: Iterable[StoredFile], parts: Iterable[Checksum]
) -> None:
    """Check the files of which these are all parts, in the order of their bytes; see `Damaged`."""
    joined = _join(parts)
    for file in files:
        found = joined.get(file.name)
        if found is not None and found[1:] != (file.size, file.checksum):
            raise Damaged(f"{checkpoint.path}/{file.name} has been modified")


def _pieces(files: Iterable[StoredFile], rank: int, size: int) -> Iterator[Piece]:
    """Divide the bytes of all files, one after another, among the ranks and into pieces."""
    files = [file for file in files if file.name != METADATA]  # which users may update
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


def _read(checkpoint: Checkpoint, piece: Piece) -> Checksum:
    file, filesystem = piece.file, checkpoint.filesystem
    path = f"{checkpoint.path}/{file.name}"
    info = filesystem.get_file_info(native(filesystem, path))
    if info.type != pafs.FileType.File:
        raise Damaged(f"{path} is missing")
    if info.size != file.size:
        raise Damaged(f"{path} has {info.size:,} bytes instead of {file.size:,}")
    size = piece.stop - piece.start
    with filesystem.open_input_file(native(filesystem, path)) as opened:
        stream = opened.get_stream(piece.start, size)
        if not is_local(filesystem):
            stream = pa.BufferedInputStream(stream, READ_AHEAD)
        return Checksum(file.name, size, _transfer(stream)[1])


def _join(parts: Iterable[Checksum]) -> dict[str, Checksum]:
    """Return one checksum for the parts of each file, which are in the order of their bytes."""
    joined: dict[str, Checksum] = {}
    for part in parts:
        before = joined.get(part.name, Checksum(part.name, 0, 0))
        checksum = _combine(before.checksum, part.checksum, part.size)
        joined[part.name] = Checksum(part.name, before.size + part.size, checksum)
    return joined


# zlib's ``crc32_combine``, which Python does not have. The highest bit is the coefficient of x to
# the power 0.
_POLYNOMIAL = 0xEDB88320
_ONE, _X = 1 << 31, 1 << 30


def _combine(first: int, second: int, second_size: int) -> int:
    """Return the CRC-32 of two pieces, the second of which has so many bytes."""
    # The first checksum, times x to the power of the second piece's bits, modulo the polynomial.
    power, square, exponent = _ONE, _X, 8 * second_size
    while exponent:
        if exponent & 1:
            power = _multiply(power, square)
        square = _multiply(square, square)
        exponent >>= 1
    return _multiply(power, first) ^ second


def _multiply(one: int, other: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product
