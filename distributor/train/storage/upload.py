"""Uploads one file in one pass, with its checksum."""

from __future__ import annotations

import os
import stat
import zlib
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs

from distributor.core.atomic_files import atomic_path
from distributor.train.storage.filesystems import is_local

CHUNK = 1024 * 1024
"""Bytes at a time that are passed on: of twice as many, Linux took four times as long to write."""
AT_ONCE = 1024 * CHUNK
"""Bytes that the kernel is asked to copy at a time."""
REQUEST = 16 * CHUNK
"""Bytes that are asked of storage at a time: each costs a remote one a round trip."""
PARTIAL = ".partial"
"""What a file's name ends with while a rank copies it."""


def brought(file: Path, filesystem: pafs.FileSystem, target: str, *, keep: bool) -> tuple[int, int]:
    """Bring a file of this machine to storage; give its size and checksum.

    Parameters
    ----------
    file : Path
        The file.
    filesystem : pyarrow.fs.FileSystem
        Storage.
    target : str
        Its path there.
    keep : bool
        Whether it may still be used where it is. If not, and storage is on the same disk, it is not
        copied, but gets its place there as a second name, and nobody may write to it until the
        first is removed. What is kept may be written over by the next save, and that must not
        reach what is in storage.
    """
    if not is_local(filesystem):
        with file.open("rb") as source, filesystem.open_output_stream(target) as sink:
            return _passed_on(source, sink)
    Path(target).unlink(missing_ok=True)  # of a rank that was killed; perhaps this very file
    if keep or not _linked(file, target):
        _copy(file, target)
    return size_and_checksum(filesystem, str(file))


def size_and_checksum(filesystem: pafs.FileSystem, path: str) -> tuple[int, int]:
    """Read a file; give its size and checksum."""
    ahead = None if is_local(filesystem) else REQUEST
    with filesystem.open_input_stream(path, buffer_size=ahead) as stream:
        return _passed_on(stream)


def break_hardlink(path: str) -> None:
    """Give a file on this machine a content of its own where another name has the same.

    A rank that was killed before its own folder was removed leaves one, through which the next
    attempt might write.
    """
    if os.stat(path).st_nlink == 1:
        return
    try:
        with atomic_path(path, partial=f"{path}{PARTIAL}") as partial:
            _copy(Path(path), partial)
    except OSError as error:  # the disk is full, say: it is whole all the same
        print(f"distributor: {path} keeps its other name: {error}.", flush=True)


def _passed_on(source: Any, sink: Any = None) -> tuple[int, int]:
    size = checksum = 0
    buffer = memoryview(bytearray(CHUNK))
    while count := source.readinto(buffer):
        chunk = buffer[:count]
        if sink is not None:
            sink.write(chunk)
        size, checksum = size + count, zlib.crc32(chunk, checksum)
    return size, checksum


def _linked(file: Path, target: str) -> bool:
    """Give a file a second name; tell whether that can be done, and is safe."""
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        return False  # by yet another name, it could be changed later
    try:
        os.link(file, target)
    except OSError:  # another disk, or one that knows no second names
        return False
    return True


def _copy(file: Path, target: str | Path) -> None:
    """Copy a file on this machine.

    The kernel does it, and on XFS, Btrfs and NFS it only notes that both have the same content.
    """
    with file.open("rb", buffering=0) as source, open(target, "wb") as sink:
        try:
            while os.copy_file_range(source.fileno(), sink.fileno(), AT_ONCE):
                pass
        except (AttributeError, OSError):  # not on this system, or not between these two disks
            _passed_on(source, sink)  # from where it stopped
