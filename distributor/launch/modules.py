"""The user's own modules: what this process can import and the executors perhaps cannot.

They are the Python files beside the notebook or script, and in other folders of ``sys.path`` that
belong to no installation. A changed file is another archive, so ranks have what lies here now.
"""

from __future__ import annotations

import functools
import hashlib
import os
import site
import sys
import sysconfig
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from distributor.launch.console import warn
from distributor.launch.session import Session
from distributor.wire.room import in_bytes

MOST_BYTES = 64 * 1024 * 1024
"""Bytes of a folder beyond which only those of its modules travel that are imported here."""
LARGE_FILE = 1024 * 1024
"""Bytes from which a file that is no Python in a package is data, and stays."""
SKIPPED = ("__pycache__", ".git", ".venv", "node_modules")
OURS = "distributor"


def shipped_modules(session: Session, beside: Sequence[Path]) -> str | None:
    """Bring the user's modules to every executor, once as long as they are the same.

    Parameters
    ----------
    session : Session
        Where the ranks will run.
    beside : sequence of Path
        Folders to look into before those of ``sys.path``.

    Returns
    -------
    str or None
        The name of the archive there; None where there are no such modules.
    """
    files = own_modules(beside)
    if not files:
        return None
    name = f"distributor-modules-{_digest(files)}.zip"
    session.ship(name, lambda path: _pack(files, path))
    return name


def own_modules(beside: Sequence[Path] = ()) -> dict[str, Path]:
    """List the files of the user's modules.

    Returns
    -------
    dict of str to Path
        By their place below a folder of ``sys.path``; of two in one place the first counts, as it
        does for an import.
    """
    files: dict[str, Path] = {}
    for folder in dict.fromkeys([*beside, *own_folders()]):
        found = dict(_files_in(folder))
        size = sum(path.stat().st_size for path in found.values())
        if size > MOST_BYTES:
            warn(
                f"The modules in {folder} take {in_bytes(size)}: only those that are imported "
                "here now are brought to the executors."
            )
            imported = _imported()
            found = {name: path for name, path in found.items() if path in imported}
        files = found | files
    return files


def own_folders() -> Iterator[Path]:
    """List the folders of ``sys.path`` that belong to no installation: the user's."""
    for entry in sys.path:
        folder = Path(entry or os.getcwd()).absolute()
        if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK) and not _is_installed(folder):
            yield folder


def _is_installed(folder: Path) -> bool:
    if {"site-packages", "dist-packages"} & set(folder.parts):
        return True
    return any(folder.is_relative_to(base) for base in _installed())


@functools.cache
def _installed() -> tuple[Path, ...]:
    """List where Python and its packages are installed, Spark's own among them."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [sysconfig.get_path(kind) for kind in kinds]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    folders += [home for home in [os.environ.get("SPARK_HOME")] if home]
    return tuple(dict.fromkeys(Path(folder).absolute() for folder in folders))


def _files_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """List the modules and packages in a folder, by name."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.endswith(".py") and entry.is_file() and os.access(entry, os.R_OK):
                yield entry.name, Path(entry.path)
            elif entry.name != OURS and entry.is_dir() and _is_package(Path(entry.path)):
                yield from _files_of_package(folder, Path(entry.path))


def _is_package(folder: Path) -> bool:
    return folder.name.isidentifier() and (folder / "__init__.py").is_file()


def _files_of_package(root: Path, package: Path) -> Iterator[tuple[str, Path]]:
    for folder, subfolders, names in os.walk(package):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED)
        for name in sorted(names):
            path = Path(folder, name)
            if not path.is_file() or not os.access(path, os.R_OK):
                continue
            if name.endswith(".py") or path.stat().st_size < LARGE_FILE:
                yield str(path.relative_to(root)), path


def _imported() -> set[Path]:
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return {Path(file).absolute() for file in files if file}


def _digest(files: Mapping[str, Path]) -> str:
    """Tell one state of the files from any other, without reading them."""
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        status = path.stat()
        digest.update(f"{name}\0{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]


def _pack(files: Mapping[str, Path], archive: Path) -> None:
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, path in files.items():
            # With a fixed date: zip knows none before 1980.
            packed.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
