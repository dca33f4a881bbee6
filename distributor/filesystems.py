"""File systems by path or address, and the files and folders in them.

An address is resolved by pyarrow if it can, else by fsspec or hdfs-native.
"""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from distributor._compat.pyspark import sent_hadoop_configuration
from distributor.core.files import absolute, local_path

HDFS = ("hdfs", "viewfs")
OBJECT_STORES = ("s3", "gcs")
"""The types of file systems in which a file can be written without a folder."""
_QUOTE = "\u201b"
"""Precedes the hexadecimal digits of a byte in a stored name; rclone quotes names alike."""


class UnknownScheme(ValueError):
    """No file system is registered for the scheme of an address; a program may register one."""


def resolve(path: str | os.PathLike[str], filesystem: Any = None) -> tuple[pafs.FileSystem, str]:
    """Return the file system of a path or address, by default the one it names, and the path in it.

    A path on this machine becomes absolute. Raises TypeError if `filesystem` is neither pyarrow's
    nor fsspec's, UnknownScheme, or ValueError for a path that only looks like one of this machine.
    """
    text = os.fspath(path)
    if filesystem is not None:
        found = adapted(filesystem)
        # Normalized as the file system lists it: a SubTreeFileSystem, without the first slash.
        inside = local_path(text) if is_local(found) else found.normalize_path(text)
        return found, inside.rstrip("/")
    address = absolute(text)
    if "://" not in address:
        return pafs.LocalFileSystem(), address
    try:
        found, inside = pafs.FileSystem.from_uri(address)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as unavailable:
        if urlsplit(address).scheme in HDFS:
            return _resolve_with_hdfs_native(address, unavailable)
        if isinstance(unavailable, OSError):
            raise
        return _resolve_with_fsspec(address, unavailable)
    return found, str(inside).rstrip("/")


def adapted(filesystem: Any) -> pafs.FileSystem:
    """Return a file system of pyarrow or fsspec as one of pyarrow."""
    if isinstance(filesystem, pafs.FileSystem):
        return filesystem
    if hasattr(filesystem, "ls") and hasattr(filesystem, "open"):
        return pafs.PyFileSystem(_Handler(filesystem))
    raise TypeError(
        "A file system must be one of pyarrow (pyarrow.fs) or fsspec, but the one that was passed "
        f"is {filesystem!r}."
    )


class _Handler(pafs.FSSpecHandler):  # type: ignore[misc]
    """A file system of fsspec.

    With pyarrow's own handler, a file does not exist if storage cannot be reached, and hdfs-native
    receives a ``Buffer``, which it converts one byte at a time.
    """

    def open_input_file(self, path: str) -> pa.PythonFile:
        try:
            return pa.PythonFile(self.fs.open(path, mode="rb"), mode="r")
        except OSError as error:
            if error.errno == errno.ENOENT:  # of another type in some file systems
                raise FileNotFoundError(path) from error
            raise

    open_input_stream = open_input_file

    def open_output_stream(self, path: str, metadata: Any) -> pa.PythonFile:
        return pa.PythonFile(_BytesWriter(self.fs.open(path, mode="wb")), mode="w")


class _BytesWriter(io.RawIOBase):
    """A file that is written to as ``bytes``."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        written: int = self._file.write(bytes(data))
        return written

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._file.close()


def _resolve_with_hdfs_native(address: str, unavailable: Exception) -> tuple[pafs.FileSystem, str]:
    # hdfs-native needs neither Java nor Hadoop's own library, and reads HADOOP_CONF_DIR. Without a
    # host in the address, its ``fs.defaultFS`` is used.
    parts = urlsplit(address)
    try:
        from hdfs_native.fsspec import HdfsFileSystem, ViewfsFileSystem
    except ImportError as error:
        raise UnknownScheme(
            f"{address} cannot be used: pyarrow does not find Hadoop's own library "
            f"({str(unavailable).strip()!r}), and hdfs-native, which needs none, is not installed "
            "(pip install hdfs-native, in the environment of the ranks too)."
        ) from error
    if configuration := sent_hadoop_configuration():
        os.environ["HADOOP_CONF_DIR"] = configuration  # it looks nowhere else
    kind = {"hdfs": HdfsFileSystem, "viewfs": ViewfsFileSystem}[parts.scheme]
    return adapted(kind(parts.hostname, parts.port)), parts.path.rstrip("/")


def _resolve_with_fsspec(address: str, unknown: Exception) -> tuple[pafs.FileSystem, str]:
    try:
        from fsspec.core import url_to_fs

        found, inside = url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise UnknownScheme(
            f"No file system is known for {address}: pyarrow says {str(unknown)!r}, and fsspec "
            f"{str(error)!r}. Install the package that provides it, or pass a file system."
        ) from error
    return adapted(found), str(inside).rstrip("/")


def describe_error(error: Exception) -> str:
    """Return an exception's type and message, without the Java stack of an error of HDFS."""
    return re.split(r"(?:\n|\\n)(?:\t|\\t)at ", f"{type(error).__name__}: {error}")[0]


def is_local(filesystem: pafs.FileSystem) -> bool:
    """Return whether it is this machine's file system, which includes mounted shares."""
    return isinstance(filesystem, pafs.LocalFileSystem)


def native(filesystem: pafs.FileSystem, path: str) -> str | bytes:
    """Return a path as the methods of its file system take it."""
    # Names on this machine are bytes, which need not be UTF-8 as pyarrow assumes of a str.
    return os.fsencode(path) if is_local(filesystem) else path


def stored_name(filesystem: pafs.FileSystem, name: str) -> str:
    """Return how a file of this machine is named in a file system."""
    if is_local(filesystem):
        return name
    # Object stores have names in Unicode only: a byte of a name that is not in UTF-8 is quoted.
    return re.sub(
        f"{_QUOTE}|[\udc80-\udcff]",
        lambda found: (
            _QUOTE + (_QUOTE if found[0] == _QUOTE else f"{os.fsencode(found[0])[0]:02X}")
        ),
        name,
    )


def local_name(name: str) -> str:
    """Return the name of a file of which this is the `stored_name` in another file system."""
    return re.sub(
        f"{_QUOTE}({_QUOTE}|[89A-F][0-9A-F])",
        lambda found: _QUOTE if found[1] == _QUOTE else os.fsdecode(bytes.fromhex(found[1])),
        name,
    )


class Entry(NamedTuple):
    """A file or a folder."""

    path: str
    is_file: bool


def existing(filesystem: pafs.FileSystem, paths: Sequence[str]) -> list[Entry]:
    """Return which of these files and folders exist."""
    infos = filesystem.get_file_info([native(filesystem, path) for path in paths])
    return [
        Entry(path, info.type == pafs.FileType.File)
        for path, info in zip(paths, infos, strict=True)
        if info.type != pafs.FileType.NotFound
    ]


def entries(
    filesystem: pafs.FileSystem,
    folder: str,
    *,
    recursive: bool = True,
    allow_not_found: bool = False,
) -> list[Entry]:
    """List the files and folders in a folder.

    On this machine, links to files and folders are followed, except to a folder above.
    """
    if not is_local(filesystem):
        selector = pafs.FileSelector(folder, allow_not_found, recursive)
        infos = filesystem.get_file_info(selector)
        return [Entry(info.path, info.type == pafs.FileType.File) for info in infos]
    if not os.path.isdir(folder):
        if allow_not_found:
            return []
        raise FileNotFoundError(f"There is no folder {folder}.")
    found = []
    # pyarrow cannot list names that are not in UTF-8.
    for parent, folders, files in os.walk(folder, onerror=_raise, followlinks=True):
        folders[:] = [name for name in folders if not _leads_back(parent, name)]
        found += [Entry(os.path.join(parent, name), False) for name in folders]
        paths = (os.path.join(parent, name) for name in files)
        found += [Entry(path, True) for path in paths if os.path.isfile(path)]
        if not recursive:
            break
    return found


def _leads_back(parent: str, name: str) -> bool:
    """Return whether a folder is a link to one of the folders that lead to it."""
    link = os.path.join(parent, name)
    if not os.path.islink(link):
        return False
    above = accumulate(parent.split("/"), "{}/{}".format)
    return any(os.path.samefile(link, folder or "/") for folder in above)


def _raise(error: OSError) -> NoReturn:
    raise error


def matches(filesystem: pafs.FileSystem, path: str) -> list[Entry]:
    """Return the files and folders that a path or a pattern names, sorted."""
    if found := existing(filesystem, [path]):
        return found
    parts = path.split("/")
    names = _expand(filesystem, parts[0], parts[1:]) if _is_pattern(path) else []
    return existing(filesystem, sorted(set(names)))


def _expand(filesystem: pafs.FileSystem, folder: str, parts: list[str]) -> list[str]:
    """Return paths that match a pattern, of which only the last part may not exist."""
    if not parts:
        return [folder]
    first, *rest = parts
    if not _is_pattern(first):
        return _expand(filesystem, f"{folder}/{first}", rest)
    anywhere = first == "**"
    found = [
        entry.path
        for entry in entries(filesystem, folder or "/", recursive=anywhere, allow_not_found=True)
        if (anywhere or fnmatchcase(os.path.basename(entry.path), first))
        and not (rest and entry.is_file)
    ]
    return [
        path
        for each in ([folder, *found] if anywhere else found)
        for path in _expand(filesystem, each, rest)
    ]


def _is_pattern(text: str) -> bool:
    return any(character in text for character in "*?[")


def list_files(filesystem: pafs.FileSystem, folder: str) -> list[str]:
    """List the files in a folder, recursively, by their paths in it."""
    folder = folder.rstrip("/") or "/"
    start = len(folder.rstrip("/")) + 1
    return [path[start:] for path, is_file in entries(filesystem, folder) if is_file]


def make_folder(filesystem: pafs.FileSystem, path: str) -> None:
    """Make a folder that files can be written to."""
    # Object stores need no folders, and to make one pyarrow asks about the whole bucket, which
    # fails with permissions for a part of it.
    if filesystem.type_name in OBJECT_STORES:
        return
    folder = native(filesystem, path)
    try:
        filesystem.create_dir(folder, recursive=True)
    except FileNotFoundError:  # a run that ends has just removed an empty folder above it
        filesystem.create_dir(folder, recursive=True)
