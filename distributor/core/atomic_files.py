"""Writes files and folders that appear under their final name complete, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, replacing it if it exists; other processes never see a part of it."""
    with atomic_path(path) as partial:
        partial.write_bytes(data)


@contextlib.contextmanager
def atomic_path(
    path: str | os.PathLike[str], partial: str | os.PathLike[str] | None = None
) -> Iterator[Path]:
    """Yield a path to write a file or folder at, which is renamed to `path` afterwards.

    A file replaces the file at `path`. A folder does not replace a folder that has content: if
    another process has made `path` in the meantime, that one stays and this one is removed. If the
    block raises, what it has written is removed, and `path` stays as it was.
    """
    path = Path(path)
    if partial is None:
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    partial = Path(partial)
    _remove(partial)
    try:
        yield partial
        _rename(partial, path)
    finally:
        _remove(partial)


def _rename(partial: Path, path: Path) -> None:
    try:
        partial.replace(path)
    except OSError:
        if not (partial.is_dir() and path.is_dir()):
            raise


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
