"""The files of a checkpoint: uploaded in one pass, and checked later by their checksums.

The manifest, which lists them, is written last, and makes the checkpoint count.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from distributor import runtime
from distributor.core.files import atomic_path
from distributor.errors import DistributorError
from distributor.filesystems import is_local, native
from distributor.train.storage.checkpoint import METADATA, Checkpoint

MANIFEST = ".manifest.json"
CHECKPOINT_LOG = ".reports.jsonl"
"""The log of the run's reports up to this checkpoint, from which a new attempt continues; see
`ReportLog`."""
RUN_LOG = "reports.jsonl"
"""The log in the run's folder, for people and for `Result`."""
VALIDATION = ".validation.json"
"""The result of a checkpoint's validation, which the driver writes."""
RESERVED = (MANIFEST, CHECKPOINT_LOG, VALIDATION)
"""The files of a checkpoint that are written for the run, and that no rank saves."""
COMMITTED, PENDING = "COMMITTED", "PENDING_VALIDATION"
"""What a manifest says as long as there is no result of a validation."""


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint, or the next part of it."""

    name: str  # its path, relative to the checkpoint's folder
    size: int
    checksum: int  # CRC-32


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a committed checkpoint."""

    index: int  # orders the checkpoints of a run, from 0
    metrics: Mapping[str, Any] = field(default_factory=dict)  # those of rank 0
    world_size: int
    positions: Mapping[str, Any] = field(default_factory=dict)  # of data loaders, by their numbers
    files: tuple[StoredFile, ...]
    validation: Mapping[str, Any] | None = None  # arguments of ValidationTaskConfig, if requested
    status: str = COMMITTED  # the name of a ReportedCheckpointStatus
    retention: Mapping[str, Any] = field(default_factory=dict)  # `CheckpointSettings.retention`

    @property
    def is_pending(self) -> bool:
        """Whether it is yet to be validated."""
        return self.status == PENDING

    def validated(self, result: StoredValidation | None) -> Manifest:
        """Return the manifest with the result of a validation, if it is one of this checkpoint."""
        if result is None or result.index != self.index:
            return self
        return replace(self, status=result.status, metrics={**self.metrics, **result.metrics})

    def to_json(self) -> bytes:
        fields = json.dumps(asdict(self))
        return json.dumps({"checksum": zlib.crc32(fields.encode()), "of": fields}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Parse a manifest; raises ValueError, TypeError or KeyError if it is damaged."""
        envelope = json.loads(text)
        if zlib.crc32(envelope["of"].encode()) != envelope["checksum"]:
            raise ValueError("The manifest's checksum does not match its content.")
        fields = json.loads(envelope["of"])
        return cls(**{**fields, "files": tuple(StoredFile(**file) for file in fields["files"])})


@dataclass(frozen=True, kw_only=True)
class StoredValidation:
    """The result of a checkpoint's validation."""

    index: int  # of the checkpoint: of two with one name, one may have been removed
    status: str
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> StoredValidation | None:
        """Parse a result; return None if it is incomplete."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None


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
) -> list[StoredFile]:
    """Read a rank's share of a checkpoint: the same number of bytes for each of `size` ranks.

    `files` is what the manifest says of them. Returns the parts of files that this rank does not
    read completely, for `check_parts`. Raises `Damaged` if a file is missing, or is not what was
    written.
    """
    pieces = list(_pieces(files, rank, size))
    with ThreadPoolExecutor(READERS, "readers") as readers:
        read = list(readers.map(lambda piece: _read(checkpoint, *piece), pieces))
    parts = _join(read).values()
    sizes = {file.name: file.size for file in files}
    check_parts(checkpoint, files, [part for part in parts if part.size == sizes[part.name]])
    return [part for part in parts if part.size < sizes[part.name]]


def check_parts(
    checkpoint: Checkpoint, files: Iterable[StoredFile], parts: Iterable[StoredFile]
) -> None:
    """Check the files of which these are all parts, in the order of their bytes; see `Damaged`."""
    joined = _join(parts)
    for file in files:
        if joined.get(file.name, file) != file:
            raise Damaged(f"{checkpoint.path}/{file.name} has been modified")


def _pieces(
    files: Iterable[StoredFile], rank: int, size: int
) -> Iterator[tuple[StoredFile, int, int]]:
    """Divide the bytes of all files, one after another, among the ranks and into pieces.

    A piece is a file, and the positions in it at which the piece starts and stops.
    """
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
                yield file, begin, min(begin + PIECE, last)
        elif not file.size and start <= offset < stop:
            yield file, 0, 0
        offset += file.size


def _read(checkpoint: Checkpoint, file: StoredFile, start: int, stop: int) -> StoredFile:
    filesystem = checkpoint.filesystem
    path = f"{checkpoint.path}/{file.name}"
    info = filesystem.get_file_info(native(filesystem, path))
    if info.type != pafs.FileType.File:
        raise Damaged(f"{path} is missing")
    if info.size != file.size:
        raise Damaged(f"{path} has {info.size:,} bytes instead of {file.size:,}")
    with filesystem.open_input_file(native(filesystem, path)) as opened:
        stream = opened.get_stream(start, stop - start)
        if not is_local(filesystem):
            stream = pa.BufferedInputStream(stream, READ_AHEAD)
        return StoredFile(file.name, *_transfer(stream))


def _join(parts: Iterable[StoredFile]) -> dict[str, StoredFile]:
    """Join the parts of each file, which are in the order of their bytes."""
    joined: dict[str, StoredFile] = {}
    for part in parts:
        before = joined.get(part.name, StoredFile(part.name, 0, 0))
        checksum = _combine(before.checksum, part.checksum, part.size)
        joined[part.name] = StoredFile(part.name, before.size + part.size, checksum)
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
