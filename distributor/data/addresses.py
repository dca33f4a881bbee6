"""File systems by address: pyarrow's if it can provide one, else fsspec's or hdfs-native's."""

from __future__ import annotations

import errno
import io
import os
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from distributor._compat.pyspark import sent_hadoop_configuration

HDFS = ("hdfs", "viewfs")


class UnknownScheme(ValueError):
    """No file system is registered for the scheme of an address; a program may register one."""


def resolve_address(address: str) -> tuple[pafs.FileSystem, str]:
    """Return the file system of an address such as ``s3://bucket/folder``, and the path in it.

    Raises
    ------
    UnknownScheme
        If nothing that is installed provides the file system.
    """
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
    """Return a file system of pyarrow or fsspec as one of pyarrow.

    Raises
    ------
    TypeError
        If it is neither.
    """
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
    """A file that is written to as ``bytes``.

    Parameters
    ----------
    file : file
        The file, which is closed with this one.
    """

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
    """Use a client of HDFS that needs neither Java nor Hadoop's own library.

    It reads HADOOP_CONF_DIR. Without a host in the address, its ``fs.defaultFS`` is used.
    """
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
