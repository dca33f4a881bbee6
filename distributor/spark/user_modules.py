"""The user's own modules, which this process can import and the executors may not have.

They are modules that belong to no installation, such as those beside the notebook or script. Those
are sent that the program imports, that these import in turn, that this process has imported, and
that the user requested. A changed file makes another archive, so ranks always have the current
files.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
import sys
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.machinery import BYTECODE_SUFFIXES, SOURCE_SUFFIXES, PathFinder
from pathlib import Path
from urllib.parse import quote, unquote, urlparse

from distributor.core.module_search import (
    Location,
    forget_listings,
    imported,
    is_installed,
    locate,
    search_path,
)
from distributor.core.resources import format_bytes
from distributor.core.text import counted
from distributor.screen.messages import warn_once
from distributor.serialization.code_search import imports_in_source
from distributor.serialization.program import Call, Module, Program, Script
from distributor.spark.session import Session
from distributor.spark.shipping import send_file

MAX_PACKAGE_BYTES = 64 * 1024 * 1024
"""Bytes of a package above which it is not sent whole."""
LARGE_FILE = 1024 * 1024
"""Bytes from which a file of a package is left out if it is data."""
SKIPPED = ("__pycache__", ".git", ".venv", "node_modules")
NOT_SENT = ("distributor", "pyspark", "py4j", *sys.builtin_module_names)
"""Modules that executors have, or that are sent in another way."""
ARCHIVE = "distributor-modules-"
_HUB = re.compile(r"huggingface|hf\.co\b|Repo id must")
_LIBRARY = re.compile(r"\.(so|dylib|dll|pyd)(\.\d+)*$")

Requested = Sequence[str | os.PathLike[str]]
"""Modules by name, and files and folders by path."""


@dataclass(frozen=True)
class ModuleFile:
    """A file of the user's modules.

    Parameters
    ----------
    path : Path
        The file, or the zip file that contains it.
    size, changed_at : int
        Its size in bytes, and its modification time in ns.
    member : str
        Its name in the zip file; empty if it is in none.
    is_executable : bool
        Whether it may be executed.
    """

    path: Path
    size: int
    changed_at: int
    member: str = ""
    is_executable: bool = False

    @classmethod
    def at(cls, path: Path) -> ModuleFile:
        status = path.stat()
        return cls(
            path, status.st_size, status.st_mtime_ns, is_executable=bool(status.st_mode & 0o100)
        )

    @property
    def name(self) -> str:
        return self.member or self.path.name

    @property
    def is_library(self) -> bool:
        """Whether it is a compiled extension, or a library that one needs."""
        return bool(_LIBRARY.search(self.name))

    @property
    def is_code(self) -> bool:
        return self.is_library or self.name.endswith((*SOURCE_SUFFIXES, *BYTECODE_SUFFIXES))

    def read(self) -> bytes:
        if not self.member:
            return self.path.read_bytes()
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(self.member)


Files = dict[str, ModuleFile]
"""Files by their path below a folder of ``sys.path``."""


@dataclass
class Selection:
    """What is sent to the executors.

    Parameters
    ----------
    files : dict of str to ModuleFile
        The files that are sent.
    left_out : dict of str to str
        Files of the same packages that are not sent, with the reason.
    warnings : list of str
        What the user should know about that.
    """

    files: Files = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def check_py_modules(requested: object) -> None:
    """Check ``py_modules``: each entry must exist."""
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


def located_modules(program: Program, requested: Requested) -> tuple[Location, ...]:
    """Return the modules that local ranks need and do not find by this process's ``sys.path``.

    Scripts import what they find themselves, so they only need what the user requested.
    """
    forget_listings()
    wanted = list(imported()) if isinstance(program, Call) else []
    named = (os.fspath(entry) for entry in requested if not Path(entry).exists())
    wanted += filter(None, map(_requested_module, named))
    path = search_path()
    return tuple(
        found
        for found in wanted
        if found.name not in NOT_SENT and not found.archive and not _is_found(found, path)
    )


def ship_modules(
    session: Session,
    first: Sequence[str] = (),
    imports: Collection[str] = (),
    requested: Requested = (),
) -> str | None:
    """Send the user's modules to every executor, once while they are unchanged.

    Parameters
    ----------
    session : Session
        The session.
    first : sequence of str
        Folders that are searched before those of ``sys.path``.
    imports : collection of str
        What is imported, by full names, in addition to what this process has imported.
    requested : sequence of str or path
        What the user requested.

    Returns
    -------
    str or None
        The name of the archive; None if there are no such modules.
    """
    selection = select_modules(first, imports, requested)
    for warning in selection.warnings:
        warn_once(warning)
    if not selection.files:
        return None
    name = f"{ARCHIVE}{_digest(selection.files)}.zip"
    send_file(session, name, lambda path: _pack(selection.files, path))
    return name


def select_modules(
    first: Sequence[str] = (), imports: Collection[str] = (), requested: Requested = ()
) -> Selection:
    """Return the files of the user's modules that ranks need."""
    forget_listings()
    selected = Selection()
    for entry in requested:
        selected.files = _requested_files(entry) | selected.files
    requested_files = set(selected.files)
    here = {found.name for found in imported()}
    wanted = [*imports, *here, *_imports_of(selected.files)]
    seen: dict[str, Location | None] = {}
    while wanted:
        name = wanted.pop()
        # Some namespaces of editable installations have no folder: what is inside them is sent.
        names = [name] if name in here else itertools.accumulate(name.split("."), "{}.{}".format)
        new = next((part for part in names if seen.get(part) or part not in seen), name)
        if new in seen or new.partition(".")[0] in NOT_SENT:
            continue
        # `first` has top-level modules only.
        location = seen[new] = locate(new, () if "." in new else first)
        if location is None:
            wanted += [name] if new != name else []
            continue
        found = _part_of(location, first)
        wanted += _imports_of(found.files)
        selected.files = selected.files | found.files
        if not requested_files >= found.left_out.keys():
            selected.left_out |= found.left_out
            selected.warnings += found.warnings
    return selected


def hint(error: Exception, program: Program, requested: Requested) -> str | None:
    """Return why a rank lacks a module or a file that the driver has, if it does."""
    if isinstance(error, ModuleNotFoundError):
        return _hint_about_module(error.name or "", program, requested)
    if not isinstance(error, OSError):
        return None
    is_of_hub = _HUB.search(str(error))  # which takes a folder that is not there for a name
    paths = _paths_in(error) if is_of_hub or isinstance(error, FileNotFoundError) else iter(())
    if is_of_hub:
        paths = itertools.chain(paths, _relative_paths_in(program))
    hints = (_hint_about_file(path, program) for path in paths)
    return next(filter(None, hints), None)


def own_folders() -> Iterator[Path]:
    """Return the user's folders: those of ``sys.path`` that belong to no installation."""
    for entry in search_path():
        folder = Path(entry)
        if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK) and not is_installed(entry):
            yield folder


def _hint_about_module(name: str, program: Program, requested: Requested) -> str | None:
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    first = folders_of_program(program)
    location = locate(name, () if "." in name else first)
    if location is None or not (files := _files_of(location, first)):
        return None
    selection = select_modules(first, program.imports, requested)
    if files.keys() & selection.files.keys():
        return None
    reasons = (selection.left_out[file] for file in files if file in selection.left_out)
    reason = next(reasons, "nothing that runs on the ranks has an import statement for it")
    return (
        f"On the driver '{name}' is at {location.paths[0]}. It was not sent, because {reason}: "
        f"send it with py_modules=['{name.partition('.')[0]}']."
    )


def _paths_in(error: OSError) -> Iterator[str]:
    """Yield what may be the path in an error; libraries often have it in the message only."""
    for name in (error.filename, error.filename2):
        if isinstance(name, (str, bytes)):
            yield os.fsdecode(name)
    text = str(error)
    yield from re.findall(r"['\"]([^'\"\n]+)['\"]", text)
    yield from (word.strip(".,:;") for word in text.split())


def _relative_paths_in(program: Program) -> Iterator[str]:
    """Yield what may be the name of a folder among the arguments of a program."""
    if isinstance(program, Call):
        for part in program.parts:
            texts = re.findall(rb"[\w.-]+(?:/[\w.-]+)*", memoryview(part.payload)[:LARGE_FILE])
            yield from (text.decode() for text in texts if len(text) > 1)
    yield from (arg for arg in program.args if isinstance(arg, str) and not os.path.isabs(arg))


def _hint_about_file(path: str, program: Program) -> str | None:
    if sent := re.search(rf"/{ARCHIVE}[0-9a-f]+/([^/]+)(/.*)?$", path):
        folders = [*folders_of_program(program), *search_path()]
        folders += [os.path.dirname(path) for found in imported() for path in found.paths]
        top, inner = sent[1], sent[2] or ""
        places = (os.path.join(folder, top) for folder in folders)
        if place := next((place for place in places if os.path.exists(place + inner)), None):
            return f"It is at {place}{inner} on the driver: py_modules=['{place}'] sends it."
        return None
    if "\0" in path or not os.path.exists(path):
        return None
    if os.path.isabs(path):
        found = f"{path} exists on the driver, but not on the executor of this rank"
    else:
        absolute = os.path.abspath(path)
        found = f"On the driver '{path}' is {absolute}, but ranks run in a folder of the executor"
    return (
        f"{found}. Use an absolute path to storage that all executors can reach, or read the file "
        "on the driver and pass its content as an argument."
    )


def _is_found(location: Location, path: Sequence[str]) -> bool:
    """Return whether an import finds a module at the same place by its name."""
    if "." in location.name:
        return False
    spec = PathFinder.find_spec(location.name, path)
    if spec is None:
        return False
    folders = spec.submodule_search_locations or ()
    return spec.origin == location.file if location.file else set(location.paths) <= set(folders)


def folders_of_program(program: Program) -> list[str]:
    """Return the folder with a script's own modules, or with the module that is run."""
    if isinstance(program, Script):
        return [program.folder]
    return [os.path.abspath(program.folder)] if isinstance(program, Module) else []


def _requested_files(entry: str | os.PathLike[str]) -> Files:
    """Return all files of a module, file or folder that the user requested."""
    path = Path(entry).absolute()
    if path.exists():
        return dict(_files_below(path, path.name))
    location = _requested_module(os.fspath(entry))
    return _files_of(location) if location else {}


def _requested_module(name: str) -> Location | None:
    """Return the top-level module that a name belongs to, or the module itself if it has none."""
    names = (name.partition(".")[0], name)
    # What is no name may be a path that does not exist.
    return next(filter(None, map(locate, filter(None, names))), None)


def _imports_of(files: Mapping[str, ModuleFile]) -> list[str]:
    python = (file for file in files.values() if file.name.endswith(".py"))
    return [name for file in python for name in _imports_in(file)]


@functools.lru_cache(maxsize=4096)
def _imports_in(file: ModuleFile) -> frozenset[str]:
    return imports_in_source(file.read())


def _part_of(location: Location, first: Sequence[str]) -> Selection:
    """Return the files of a module that are sent without being requested."""
    files = _files_of(location, first)
    if location.folders is None:
        return Selection(files)
    name = location.name
    # What was installed may need any of its files, and a part would hide a whole copy on executors.
    is_installation = any(path.endswith(".dist-info/RECORD") for path in files)
    small = {n: f for n, f in files.items() if is_installation or f.is_code or f.size < LARGE_FILE}
    if _size(small) <= MAX_PACKAGE_BYTES:
        left_out = files.keys() - small.keys()
        warning = (
            f"The package {name} is sent to the executors without large data: {_shown(left_out)}. "
            f"py_modules=['{name}'] sends all."
        )
        reasons = dict.fromkeys(left_out, "it is a large data file")
        return Selection(small, reasons, [warning] if left_out else [])
    takes, used = f"package {name} takes {format_bytes(_size(files))}", _files_of_imported()
    part = {n: f for n, f in small.items() if f.is_library or f.path in used}
    paths = {file.path for file in part.values()}
    if is_installation or _size(part) > MAX_PACKAGE_BYTES or used.isdisjoint(paths):
        part = {}
        warning = (
            f"The {takes} and is not sent: executors need a copy of their own. "
            f"py_modules=['{name}'] sends it."
        )
    else:
        warning = (
            f"The {takes}: only the modules that this process has imported are sent to the "
            f"executors. py_modules=['{name}'] sends all."
        )
    return Selection(part, dict.fromkeys(files.keys() - part.keys(), f"the {takes}"), [warning])


def _shown(names: Collection[str]) -> str:
    shown, more = sorted(names)[:3], len(names) - 3
    return ", ".join(shown) + (f" and {counted(more, 'other')}" if more > 0 else "")


def _size(files: Mapping[str, ModuleFile]) -> int:
    return sum(file.size for file in files.values())


def _files_of_imported() -> set[Path]:
    modules = list(sys.modules.values())
    files = [getattr(module, "__dict__", {}).get("__file__") for module in modules]
    return {Path(file).absolute() for file in files if isinstance(file, str)}


def _files_of(location: Location, first: Sequence[str] | None = None) -> Files:
    """Return the files of a module, and those that were installed with it."""
    files: Files = {}
    above, _, tail = location.name.rpartition(".")
    prefix = f"{above.replace('.', '/')}/" if above else ""
    for path in location.paths:
        folder, base = os.path.split(path)
        if first is not None and folder not in first and is_installed(path):
            continue
        suffix = "" if location.folders is not None else base[base.find(".") :]
        found = _files_in_archive if location.archive else _files_below
        # An import finds a module by its name, which need not be that of its file.
        files = dict(found(Path(path), f"{prefix}{tail}{suffix}")) | files
        if not location.archive:
            files = _installed_with(folder, base) | _metadata_of(path) | files
    if location.file and location.folders and Path(location.file).stem != "__init__":
        suffixes = "".join(Path(location.file).suffixes)
        files[f"{prefix}{tail}/__init__{suffixes}"] = ModuleFile.at(Path(location.file))
    return files


def _files_below(place: Path, name: str) -> Iterator[tuple[str, ModuleFile]]:
    """Return the readable files of a module or package, by paths that begin with a name."""
    if place.is_file():
        if os.access(place, os.R_OK):
            yield name, ModuleFile.at(place)
        return
    seen = set[str]()
    for folder, subfolders, names in os.walk(place, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link leads to a folder above it
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(each for each in subfolders if each not in SKIPPED)
        for each in sorted(names):
            path = Path(folder, each)
            if path.is_file() and os.access(path, os.R_OK):
                yield f"{name}/{path.relative_to(place).as_posix()}", ModuleFile.at(path)


def _files_in_archive(place: Path, name: str) -> Iterator[tuple[str, ModuleFile]]:
    """Return the files of a module or package in a zip file, as `_files_below` does."""
    archive = next(folder for folder in place.parents if folder.is_file())
    status, inside = archive.stat(), place.relative_to(archive).as_posix()
    with zipfile.ZipFile(archive) as packed:
        for member in packed.infolist():
            below = member.filename == inside or member.filename.startswith(f"{inside}/")
            if below and not member.is_dir() and "__pycache__" not in member.filename:
                file = ModuleFile(archive, member.file_size, status.st_mtime_ns, member.filename)
                yield name + member.filename.removeprefix(inside), file


def _installed_with(folder: str, name: str) -> Files:
    """Return all files of the distributions in a folder that a module there belongs to."""
    owned = _distributions_in(folder, os.stat(folder).st_mtime_ns).get(name, ())
    paths = ((path, Path(folder, path)) for path in owned)
    return {path: ModuleFile.at(file) for path, file in paths if file.is_file()}


@functools.lru_cache
def _distributions_in(folder: str, changed_at: int) -> dict[str, set[str]]:
    """Map what is at the top of a folder to all files of the distributions that it belongs to."""
    owned: dict[str, set[str]] = {}
    for distribution in metadata.distributions(path=[folder]):
        if distribution.read_text("RECORD") is None:
            continue
        paths = [file for file in distribution.files or () if "__pycache__" not in file.parts]
        files = {file.as_posix() for file in paths if file.parts[0] not in ("..", os.sep)}
        for top in {file.partition("/")[0] for file in files}:
            owned.setdefault(top, set()).update(files)
    return owned


def _metadata_of(path: str) -> Files:
    """Return the metadata of the editable installation that a module belongs to.

    Many packages look up their own version in it when they are imported.
    """
    return {
        f"{folder.name}/{name}": ModuleFile.at(folder / name)
        for project, folder in _editable_projects(tuple(search_path()))
        if path.startswith(project + os.sep)
        for name in ("METADATA", "entry_points.txt")
        if (folder / name).is_file()
    }


@functools.lru_cache
def _editable_projects(path: tuple[str, ...]) -> tuple[tuple[str, Path], ...]:
    """Return the projects that are installed without being copied, with their metadata."""
    found = []
    for entry in path:
        for origin in Path(entry).glob("*.dist-info/direct_url.json"):
            about = json.loads(origin.read_bytes())
            if about.get("dir_info", {}).get("editable"):
                found.append((unquote(urlparse(about["url"]).path).rstrip("/"), origin.parent))
    return tuple(found)


def _digest(files: Mapping[str, ModuleFile]) -> str:
    """Return a digest of the files' names, sizes and times, without reading them."""
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        state = f"{name}\0{file.path}\0{file.member}\0{file.size}\0{file.changed_at}\0"
        digest.update(os.fsencode(f"{state}{file.is_executable}\0"))
    return digest.hexdigest()[:16]


def _pack(files: Mapping[str, ModuleFile], archive: Path) -> None:
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        # Sorted and with a fixed date, so that equal files make equal archives. Applications may
        # share a folder, and Spark refuses a file whose namesake there differs.
        for name, file in sorted(files.items()):
            entry = zipfile.ZipInfo(quote(os.fsencode(name)))  # as names in Unicode
            entry.external_attr = (0o755 if file.is_executable else 0o644) << 16
            packed.writestr(entry, file.read(), zipfile.ZIP_DEFLATED)
