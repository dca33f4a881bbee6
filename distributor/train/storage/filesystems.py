"""File systems of storage, and the names of files in them."""

from __future__ import annotations

import os
import re
from typing import Any

import pyarrow.fs as pafs

from distributor.core.paths import absolute, local_path
from distributor.data.addresses import adapted, resolve_address

OBJECT_STORES = ("s3", "gcs")
"""The types of file systems in which a file can be written without a folder."""


_QUOTE = "\u201b"
"""Precedes the hexadecimal digits of a byte in a stored name; rclone quotes names alike."""


def resolve(path: str | os.PathLike[str], filesystem: Any = None) -> tuple[pafs.FileSystem, str]:
    """Return the file system of a path, and the path in it.

    Parameters
    ----------
    path : str or path
        A path, or an address such as ``s3://bucket/folder``; with `filesystem`, a path in it.
    filesystem : pyarrow.fs.FileSystem or fsspec file system, optional
        The file system; by default the one that the path names.

    Returns
    -------
    FileSystem
        One of pyarrow, or an adapter for one of fsspec.
    str
        The path in it; absolute if it is on this machine.

    Raises
    ------
    TypeError
        If `filesystem` is of neither kind.
    UnknownScheme
        If nothing that is installed provides the address's file system.
    ValueError
        If the path is none of this machine although it looks like one; see `core.paths`.
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
    return resolve_address(address)


def describe_error(error: Exception) -> str:
    """Return an exception's type and message, without the Java stack of an error of HDFS."""
    return re.split(r"(?:\n|\\n)(?:\t|\\t)at ", f"{type(error).__name__}: {error}")[0]


def is_local(filesystem: pafs.FileSystem) -> bool:
    """Return whether it is this machine's file system, which includes mounted shares."""
    return isinstance(filesystem, pafs.LocalFileSystem)


def native(filesystem: pafs.FileSystem, path: str) -> str | bytes:
    """Return a path as the methods of its file system take it.

    Names on this machine are bytes, which need not be UTF-8 as pyarrow assumes of a str.
    """
    return os.fsencode(path) if is_local(filesystem) else path


def stored_name(filesystem: pafs.FileSystem, name: str) -> str:
    """Return how a file of this machine is named in a file system.

    Object stores have names in Unicode only: a byte of a name that is not in UTF-8 is quoted.
    """
    if is_local(filesystem):
        return name
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


def list_files(filesystem: pafs.FileSystem, folder: str) -> list[str]:
    """List the files in a folder, recursively, by their paths in it."""
    if is_local(filesystem):
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"There is no folder {folder}.")
        paths = (
            os.path.join(parent, name)
            for parent, _, names in os.walk(folder, followlinks=True)
            for name in names
        )
        return [os.path.relpath(path, folder) for path in paths if os.path.isfile(path)]
    infos = filesystem.get_file_info(pafs.FileSelector(folder, recursive=True))
    return [info.path[len(folder) + 1 :] for info in infos if info.type == pafs.FileType.File]


def make_folder(filesystem: pafs.FileSystem, path: str) -> None:
    """Make a folder that files can be written to.

    Object stores are skipped. They need no folders, and to make one pyarrow asks about the whole
    bucket, which fails with permissions for a part of it.
    """
    if filesystem.type_name not in OBJECT_STORES:
        filesystem.create_dir(native(filesystem, path), recursive=True)
