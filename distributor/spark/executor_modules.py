"""The user's modules on an executor, as `ship_modules` has sent them."""

from __future__ import annotations

import contextlib
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from distributor.core.files import atomic_path


def spark_files_folder() -> Path:
    """Return the folder of Spark's files, which Spark names relative to its working folder."""
    from pyspark import SparkFiles

    return Path(SparkFiles.getRootDirectory()).absolute()


def unpack_modules(archive: str) -> str:
    """Unpack the user's modules, once on each node, and return their folder."""
    from pyspark import SparkFiles

    folder = spark_files_folder() / archive.removesuffix(".zip")
    if not folder.exists():
        with atomic_path(folder) as partial:  # other tasks of this node may be doing the same
            _unpack(SparkFiles.get(archive), partial)
    return str(folder)


def _unpack(archive: str, folder: Path) -> None:
    with zipfile.ZipFile(archive) as packed:
        for entry in packed.infolist():
            entry.filename = unquote(entry.filename, errors="surrogateescape")
            extracted = packed.extract(entry, folder)
            os.chmod(extracted, entry.external_attr >> 16)  # `extract` ignores permissions


@contextlib.contextmanager
def modules_from(archive: str | None) -> Iterator[None]:
    """Let a task import the user's modules; None for no archive.

    Spark reuses its Python workers: what an earlier task has imported of another archive is
    forgotten. The path is as before afterwards, because the ranks of a run get their worker's.
    """
    if archive is None:
        yield
        return
    folder = unpack_modules(archive)
    _forget_others(folder)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # what the user runs may have removed it
            sys.path.remove(folder)


_used: set[str] = set()
"""The folders of which modules may be imported in this process."""


def _forget_others(folder: str) -> None:
    for other in _used - {folder}:
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(f"{other}{os.sep}"):
                del sys.modules[name]
        _used.remove(other)
    _used.add(folder)
