"""File systems by address: pyarrow's if it knows the scheme, else fsspec's."""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from distributor.core.checkpoint_config import absolute

OBJECT_STORES = ("s3", "gcs")
"""The types of file systems in which a file needs no folder."""


def resolve(path: str | os.PathLike[str], filesystem: Any = None) -> tuple[pafs.FileSystem, str]:
    """Find the file system of a path.

    Parameters
    ----------
    path : str or path
        A path, or an address such as ``s3://bucket/folder``; with `filesystem` a path in it.
    filesystem : pyarrow.fs.FileSystem or fsspec file system, optional
        Where the path is.

    Returns
    -------
    FileSystem
        Pyarrow's, or what makes one of fsspec's.
    str
        The path in it; absolute where it is this machine's.

    Raises
    ------
    TypeError
        For a `filesystem` of neither kind.
    UnknownScheme
        For an address whose scheme nobody knows.
    """
    text = os.fspath(path)
    if filesystem is not None:
        return _adapted(filesystem), text.rstrip("/")
    if "://" not in text:
        return pafs.LocalFileSystem(), absolute(text)
    try:
        found, inside = pafs.FileSystem.from_uri(text)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as unknown:
        return _by_fsspec(text, unknown)
    return found, str(inside).rstrip("/")


class UnknownScheme(ValueError):
    """Nobody knows the scheme of an address, though a program may yet make it known."""


def is_local(filesystem: pafs.FileSystem) -> bool:
    """Tell whether it is that of this machine, mounted shares among it."""
    return isinstance(filesystem, pafs.LocalFileSystem)


def files_in(filesystem: pafs.FileSystem, folder: str) -> list[pafs.FileInfo]:
    """List the files of a folder, at any depth."""
    infos = filesystem.get_file_info(pafs.FileSelector(folder, recursive=True))
    return [info for info in infos if info.type == pafs.FileType.File]


def make_folder(filesystem: pafs.FileSystem, path: str) -> None:
    """Make a folder that files can be written to.

    An object store needs none: to make one it asks for the whole bucket, for which rights to some
    part of it are too few.
    """
    if filesystem.type_name not in OBJECT_STORES:
        filesystem.create_dir(path, recursive=True)


def _adapted(filesystem: Any) -> pafs.FileSystem:
    if isinstance(filesystem, pafs.FileSystem):
        return filesystem
    if hasattr(filesystem, "ls") and hasattr(filesystem, "open"):
        return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem))
    raise TypeError(
        "storage_filesystem is a file system of pyarrow's (pyarrow.fs) or fsspec's, but is "
        f"{filesystem!r}."
    )


def _by_fsspec(address: str, unknown: Exception) -> tuple[pafs.FileSystem, str]:
    try:
        from fsspec.core import url_to_fs

        found, inside = url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise UnknownScheme(
            f"No file system is known for {address}: pyarrow says {str(unknown)!r}, and fsspec "
            f"{str(error)!r}. Install the package that has it, or give storage_filesystem."
        ) from error
    return _adapted(found), str(inside).rstrip("/")
