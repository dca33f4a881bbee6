"""What Spark has copied to this executor: the files of a run, and the user's modules."""

from __future__ import annotations

import contextlib
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from distributor.core.files import atomic_path
from distributor.serialization.pickling import PickledCall


@dataclass(frozen=True, eq=False)
class ProgramFile:
    """A program that is too large for the task, and is in a file that Spark has sent.

    Parameters
    ----------
    name : str
        The file's name among Spark's files.
    dropped : tuple of str
        The names of such files that no run needs any more.
    further : PickledCall or None
        Arguments that are not in the file, because they differ among runs of its function.
    """

    name: str
    dropped: tuple[str, ...]
    further: PickledCall | None = None


def spark_files_folder() -> Path:
    """Return the folder of Spark's files, which Spark names relative to its working folder."""
    from pyspark import SparkFiles

    return Path(SparkFiles.getRootDirectory()).absolute()


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """Return a file or folder among Spark's, which is made unless another task has done so."""
    path = spark_files_folder() / name
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        with atomic_path(path) as partial:  # other tasks of this node may be doing the same
            make(partial)
    return path


def unpack_modules(archive: str) -> str:
    """Unpack the user's modules, once on each node, and return their folder."""

    def unpack(folder: Path) -> None:
        with zipfile.ZipFile(spark_files_folder() / archive) as packed:
            for entry in packed.infolist():
                entry.filename = unquote(entry.filename, errors="surrogateescape")
                extracted = packed.extract(entry, folder)
                os.chmod(extracted, entry.external_attr >> 16)  # `extract` ignores permissions

    return str(made_once(archive.removesuffix(".zip"), unpack))


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
    _used.clear()
    _used.add(folder)
