"""A file system that supports no more than a mounted object store: files are written once, whole.

What it refuses it refuses as such mounts do, by an OSError.
"""

from __future__ import annotations

import errno
from typing import Any, NoReturn

import pyarrow.fs as pafs
from fsspec.implementations.arrow import ArrowFSWrapper

PROTOCOL = "plain"


def plain(full: pafs.FileSystem) -> pafs.FileSystem:
    """Return a plain file system over one that supports more."""
    return pafs.PyFileSystem(_Handler(full))


class Addressed(ArrowFSWrapper):  # type: ignore[misc]
    """This machine's plain file system for fsspec, which finds it by URIs such as ``plain:///folder/runs``."""

    protocol = PROTOCOL
    root_marker = "/"

    def __init__(self, **options: Any) -> None:
        super().__init__(plain(pafs.LocalFileSystem()), **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix(f"{PROTOCOL}://")


class _Handler(pafs.FileSystemHandler):  # type: ignore[misc]
    def __init__(self, full: pafs.FileSystem) -> None:
        self._full = full

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Handler) and self._full.equals(other._full)

    __hash__ = None

    def get_type_name(self) -> str:
        return PROTOCOL

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        infos: list[pafs.FileInfo] = self._full.get_file_info(paths)
        return infos

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        infos: list[pafs.FileInfo] = self._full.get_file_info(selector)
        return infos

    def create_dir(self, path: str, recursive: bool) -> None:
        self._full.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._full.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._full.delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> NoReturn:
        _refuse("emptying all of it")

    def delete_file(self, path: str) -> None:
        self._full.delete_file(path)

    def move(self, src: str, dest: str) -> NoReturn:
        _refuse("renaming")

    def copy_file(self, src: str, dest: str) -> NoReturn:
        _refuse("copying")

    def open_input_stream(self, path: str) -> Any:
        return self._full.open_input_stream(path)

    def open_input_file(self, path: str) -> Any:
        return self._full.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        there = self._full.get_file_info(path).type != pafs.FileType.NotFound
        if there:
            _refuse("writing a file again")
        return self._full.open_output_stream(path, metadata=metadata)

    def open_append_stream(self, path: str, metadata: Any) -> NoReturn:
        _refuse("appending")


def _refuse(what: str) -> NoReturn:
    raise OSError(errno.ENOTSUP, f"{what} is not supported")
