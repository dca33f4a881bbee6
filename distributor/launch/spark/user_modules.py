"""The user's own modules, which this process can import and the executors may not have.

They are Python files beside the notebook or script, and in other folders of ``sys.path`` that
belong to no installation. Those are sent that the program imports, that these import in turn, that
this process has imported, and that the user requested. A changed file makes another archive, so
ranks always have the current files.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import site
import sys
import sysconfig
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import machinery
from pathlib import Path

from distributor.core.resources import format_bytes
from distributor.launch.output.messages import warn
from distributor.launch.spark.executor_files import send_file
from distributor.launch.spark.session import Session
from distributor.serialization.code_imports import imports_in_source
from distributor.serialization.program import Module, Program, Script

MAX_PACKAGE_BYTES = 64 * 1024 * 1024
"""Bytes of a package above which only the modules are sent that this process has imported."""
LARGE_FILE = 1024 * 1024
"""Bytes from which a file of a package that is not Python is data, and is not sent."""
SKIPPED = ("__pycache__", ".git", ".venv", "node_modules")
OURS = "distributor"
_LOADERS = (
    (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
    (machinery.SourceFileLoader, machinery.SOURCE_SUFFIXES),
)

Requested = Sequence[str | os.PathLike[str]]
"""Modules by name, and files and folders by path."""


def check_py_modules(requested: object) -> None:
    """Check ``py_modules``: each entry must exist.

    Raises
    ------
    TypeError
        If it is not a list of names and paths.
    FileNotFoundError
        If an entry is neither a file, a folder nor a module.
    """
    if (
        isinstance(requested, (str, os.PathLike))
        or not isinstance(requested, Sequence)
        or not all(isinstance(entry, (str, os.PathLike)) for entry in requested)
    ):
        raise TypeError(
            "py_modules lists modules by name and files and folders by path, such as "
            f"['helpers', '../shared/models'], but is {requested!r}."
        )
    for entry in requested:
        if not _requested_files(entry):
            raise FileNotFoundError(
                f"py_modules has '{os.fspath(entry)}', which is neither a file or a folder with "
                f"files (looked from {Path.cwd()}) nor a module in the folders of sys.path."
            )


def folders_of(requested: Requested) -> list[str]:
    """Return the folders that local ranks must search for what was requested by its path."""
    paths = [Path(entry).absolute() for entry in requested if Path(entry).exists()]
    return list(dict.fromkeys(str(path.parent) for path in paths))


def ship_modules(session: Session, program: Program, requested: Requested = ()) -> str | None:
    """Send the user's modules to every executor, once while they are unchanged.

    Parameters
    ----------
    session : Session
        The session.
    program : Program
        What the ranks run.
    requested : sequence of str or path
        ``py_modules``, which are sent in any case.

    Returns
    -------
    str or None
        The name of the archive in ``SparkFiles``; None if there are no such modules.
    """
    files = own_modules(_folders_of_program(program), program.imports, requested)
    if not files:
        return None
    name = f"distributor-modules-{_digest(files)}.zip"
    send_file(session, name, lambda path: _pack(files, path))
    return name


def own_modules(
    first: Sequence[Path] = (), imports: Collection[str] = (), requested: Requested = ()
) -> dict[str, Path]:
    """Return the files of the user's modules that ranks need.

    Parameters
    ----------
    first : sequence of Path
        Folders that are searched before those of ``sys.path``.
    imports : collection of str
        The modules that the program imports.
    requested : sequence of str or path
        ``py_modules``, which are returned in any case.

    Returns
    -------
    dict of str to Path
        The files, by their path below a folder of ``sys.path``.
    """
    folders = set(map(os.path.abspath, [*first, *own_folders()]))
    search = _Search([*map(str, first), *sys.path])
    files: dict[str, Path] = {}
    for entry in requested:
        files = _requested_files(entry) | files
    wanted = [*imports, *_imported_from(folders), *_imports_of(files)]
    seen = {OURS, *sys.builtin_module_names}
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        place = search.find(name)
        if place is not None and str(place.parent) in folders:
            found = _without_unused(dict(_files_of_package(place)))
            wanted += _imports_of(found)
            files = files | found
    return files


def how_to_send(error: ModuleNotFoundError, program: Program) -> str | None:
    """Return how to send a module that a rank lacks; None if the driver does not have it either."""
    name = error.name or ""
    first = _folders_of_program(program)
    place = _Search([*map(str, first), *sys.path]).find(name) if name.isidentifier() else None
    if place is None or str(place.parent) not in map(os.path.abspath, [*first, *own_folders()]):
        return None
    return (
        f"On the driver '{name}' is at {place}. It was not sent, because nothing that runs on "
        f"the ranks has an import statement for it: send it with py_modules=['{name}']."
    )


def own_folders() -> Iterator[Path]:
    """Return the user's folders: those of ``sys.path`` that belong to no installation."""
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
    """Return the folders where Python and its packages are installed, including Spark's."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [sysconfig.get_path(kind) for kind in kinds]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    folders += [home for home in [os.environ.get("SPARK_HOME")] if home]
    return tuple(dict.fromkeys(Path(folder).absolute() for folder in folders))


class _Search:
    """Finds modules as an import statement would, in the files as they are now."""

    def __init__(self, path: Sequence[str]) -> None:
        folders = dict.fromkeys(os.path.abspath(entry or os.getcwd()) for entry in path)
        self._finders = [machinery.FileFinder(folder, *_LOADERS) for folder in folders]

    def find(self, name: str) -> Path | None:
        """Return the file of a module or the folder of a package."""
        namespace = None
        for finder in self._finders:
            spec = finder.find_spec(name)
            if spec is None:
                continue
            if spec.origin is not None and spec.loader is not None:
                origin = Path(spec.origin)
                return origin.parent if spec.submodule_search_locations else origin
            namespace = namespace or next(iter(spec.submodule_search_locations or ()), None)
        return None if namespace is None else Path(namespace)


def _folders_of_program(program: Program) -> list[Path]:
    """Return the folder with a script's own modules, or with the module that is run."""
    if isinstance(program, Script):
        return [Path(program.path).parent]
    return [Path(program.folder)] if isinstance(program, Module) else []


def _requested_files(entry: str | os.PathLike[str]) -> dict[str, Path]:
    """Return all files of a module, file or folder that the user requested."""
    path: Path | None = Path(entry).absolute()
    if not Path(entry).exists():
        path = _Search(sys.path).find(os.fspath(entry).partition(".")[0])
    return {} if path is None else dict(_files_of_package(path, math.inf))


def _imported_from(folders: Collection[str]) -> Iterator[str]:
    """Return the top-level modules that this process has imported from these folders."""
    for name, module in list(sys.modules.items()):
        if "." not in name and name != "__main__":
            origin = getattr(module, "__file__", None)
            package = list(getattr(module, "__path__", ()))[:1]
            place = package[0] if package else origin
            if isinstance(place, str) and os.path.dirname(os.path.abspath(place)) in folders:
                yield name


def _imports_of(files: Mapping[str, Path]) -> list[str]:
    return [
        name
        for path in files.values()
        if path.suffix == ".py"
        for name in _imports_in(path, path.stat().st_size, path.stat().st_mtime_ns)
    ]


@functools.lru_cache(maxsize=4096)
def _imports_in(path: Path, size: int, changed_at: int) -> frozenset[str]:
    return imports_in_source(path.read_bytes())


def _without_unused(files: dict[str, Path]) -> dict[str, Path]:
    size = sum(path.stat().st_size for path in files.values())
    if size <= MAX_PACKAGE_BYTES:
        return files
    package = next(iter(files)).partition("/")[0]
    warn(
        f"The package {package} takes {format_bytes(size)}: only the modules that this "
        f"process has imported are sent to the executors. py_modules=['{package}'] sends all."
    )
    imported = _imported()
    return {name: path for name, path in files.items() if path in imported}


def _files_of_package(place: Path, largest: float = LARGE_FILE) -> Iterator[tuple[str, Path]]:
    """Return the readable files of a module or package, by their path below its folder."""
    if place.is_file() and os.access(place, os.R_OK):
        yield place.name, place
    for folder, subfolders, names in os.walk(place):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED)
        for name in sorted(names):
            path = Path(folder, name)
            if not path.is_file() or not os.access(path, os.R_OK):
                continue
            if name.endswith(".py") or path.stat().st_size < largest:
                yield path.relative_to(place.parent).as_posix(), path


def _imported() -> set[Path]:
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return {Path(file).absolute() for file in files if file}


def _digest(files: Mapping[str, Path]) -> str:
    """Return a digest of the files' names, sizes and times, without reading them."""
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        status = path.stat()
        digest.update(f"{name}\0{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]


def _pack(files: Mapping[str, Path], archive: Path) -> None:
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        # Sorted and with a fixed date, so that equal files make equal archives. Applications may
        # share a folder, and Spark refuses a file whose namesake there differs.
        for name, path in sorted(files.items()):
            packed.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
