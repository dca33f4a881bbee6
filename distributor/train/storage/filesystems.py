"""File systems by address: pyarrow's if it knows the scheme, else fsspec's."""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from distributor.core.paths import absolute, local_path

OBJECT_STORES = ("s3", "gcs")
"""The types of file systems in which a file can be written without a folder."""


class UnknownScheme(ValueError):
    """No file system is registered for the scheme of an address; a program may register one."""


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
        If neither pyarrow nor fsspec knows the address's scheme.
    ValueError
        If the path is none of this machine although it looks like one; see `core.paths`.
    """
    text = os.fspath(path)
    if filesystem is not None:
        adapted = _adapt(filesystem)
        # Normalized as the file system lists it: a SubTreeFileSystem, without the first slash.
        inside = local_path(text) if is_local(adapted) else adapted.normalize_path(text)
        return adapted, inside.rstrip("/")
    address = absolute(text)
    if "://" not in address:
        return pafs.LocalFileSystem(), address
    try:
        found, inside = pafs.FileSystem.from_uri(address)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as unknown:
        return _resolve_with_fsspec(address, unknown)
    return found, str(inside).rstrip("/")


def is_local(filesystem: pafs.FileSystem) -> bool:
    """Return whether it is this machine's file system, which includes mounted shares."""
    return isinstance(filesystem, pafs.LocalFileSystem)


def list_files(filesystem: pafs.FileSystem, folder: str) -> list[pafs.FileInfo]:
    """List the files in a folder, recursively."""
    infos = filesystem.get_file_info(pafs.FileSelector(folder, recursive=True))
    return [info for info in infos if info.type == pafs.FileType.File]


def make_folder(filesystem: pafs.FileSystem, path: str) -> None:
    """Make a folder that files can be written to.

    Object stores are skipped. They need no folders, and to make one pyarrow asks about the whole
    bucket, which fails with permissions for a part of it.
    """
    if filesystem.type_name not in OBJECT_STORES:
        filesystem.create_dir(path, recursive=True)


def _adapt(filesystem: Any) -> pafs.FileSystem:
    if isinstance(filesystem, pafs.FileSystem):
        return filesystem
    if hasattr(filesystem, "ls") and hasattr(filesystem, "open"):
        return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem))
    raise TypeError(
        "A file system must be one of pyarrow (pyarrow.fs) or fsspec, but the one that was passed "
        f"is {filesystem!r}."
    )


def _resolve_with_fsspec(address: str, unknown: Exception) -> tuple[pafs.FileSystem, str]:
    try:
        from fsspec.core import url_to_fs

        found, inside = url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise UnknownScheme(
            f"No file system is known for {address}: pyarrow says {str(unknown)!r}, and fsspec "
            f"{str(error)!r}. Install the package that provides it, or pass a file system."
        ) from error
    return _adapt(found), str(inside).rstrip("/")
