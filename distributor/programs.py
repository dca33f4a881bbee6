"""What ranks run, and in what: the program of the arguments of ``run``, and the environment.

A program is a pickled call, a script or a module. An environment is checked here, and sent to
executors or prepared on this machine.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import json
import os
import re
import stat
import sys
import tarfile
import threading
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, TypeAlias

from distributor.core.module_search import find_spec
from distributor.node.cache import build_once, cache_folder, with_default_cache
from distributor.node.environment import PreparedEnvironment, use_packed, use_requirements
from distributor.screen.messages import notify
from distributor.serialization import pickling
from distributor.serialization.code_search import without_partials
from distributor.serialization.pickle_diagnostics import name_of
from distributor.serialization.program import Call, Module, Program, Script
from distributor.settings import conf_cache_dir
from distributor.spark.session import Session
from distributor.spark.shipping import send_archive
from distributor.spark.user_modules import own_folders


def program_of(
    train_object: Callable[..., Any] | str | os.PathLike[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Program:
    """Return the program for the arguments of ``run``."""
    if isinstance(train_object, Module):
        return replace(train_object, args=tuple(map(str, args)))
    if isinstance(train_object, SharedFunction):
        return train_object.program(args, kwargs)
    if isinstance(train_object, (str, os.PathLike)):
        return _script(Path(train_object).expanduser(), args, kwargs)
    if not callable(train_object):
        raise TypeError(
            "run takes a callable or the path of a Python script, "
            f"but got {train_object!r} of type {type(train_object).__name__}."
        )
    check_runs(train_object)
    check_arguments(train_object, args, kwargs)
    call = pickling.dump_call(train_object, args, kwargs)
    return Call(name_of(train_object), call)


class SharedFunction:
    """A function with arguments that is pickled once, for several runs with further arguments.

    Parameters
    ----------
    function : callable
        The function.
    args, kwargs
        The arguments that all runs share.
    """

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        check_runs(function)
        self._function, self._args, self._kwargs = function, args, kwargs
        self._call = pickling.dump_call(function, args, kwargs)

    def program(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Return the program of a run with these further arguments."""
        check_arguments(self._function, (*self._args, *args), {**self._kwargs, **kwargs})
        further = pickling.dump_call(
            dict, args, kwargs, explained=self._function, given=self._call.names
        )
        return Call(name_of(self._function), self._call, further)


def check_runs(function: Callable[..., Any]) -> None:
    """Check that a call of a function runs its body."""
    function = without_partials(function)
    # A decorated function counts as what the decorator made of it.
    called = function if inspect.isroutine(function) else type(function).__call__
    for is_kind, kind, instead in _BODIES_THAT_DO_NOT_RUN:
        if is_kind(called):
            name = name_of(function)
            raise TypeError(f"{name} is {kind}: to call it does not run its body. {instead}")


def check_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Check that a function takes these arguments."""
    try:
        # A decorator may take other arguments than the function that it wraps.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return  # some functions written in C have none
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = name_of(function)
        raise TypeError(f"{name}{signature} cannot be called like this: {error}.") from None


_BODIES_THAT_DO_NOT_RUN: tuple[tuple[Callable[[object], bool], str, str], ...] = (
    (inspect.iscoroutinefunction, "an async function", "Pass one that calls asyncio.run."),
    (inspect.isasyncgenfunction, "an async generator", "Pass one that calls asyncio.run."),
    (inspect.isgeneratorfunction, "a generator", "Return a list instead of yielding."),
)


def module_of(name: str) -> Module:
    """Return the program that runs a module, found as ``python -m`` finds it.

    No package is imported for this.
    """
    folder = os.getcwd()
    path = [folder, *sys.path]
    for part in itertools.accumulate(name.split("."), "{}.{}".format):
        spec = _find_module(part, path)
    if spec.submodule_search_locations is not None:
        _find_module(f"{name}.__main__", path)
    return Module(name, folder)


def _find_module(name: str, path: Sequence[str]) -> ModuleSpec:
    if spec := find_spec(name, path):
        return spec
    raise ModuleNotFoundError(
        f"There is no module {name} (looked in {Path.cwd()} and in sys.path). "
        "Name it as for 'python -m', such as package.train.",
        name=name,
    )


def _script(path: Path, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Script:
    if kwargs:
        raise ValueError(
            "Running pytorch file does not support key-word type arguments. "
            f"{instead_of_keywords(kwargs)}"
        )
    if path.is_dir():
        raise IsADirectoryError(f"run needs the path of a Python script, but {path} is a folder.")
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no script {path} (looked in {Path.cwd()}). "
            "The driver reads the script, and sends it to nodes that do not have it."
        )
    path = path.absolute()
    source = path.read_bytes()
    _check_source(path, source)
    return Script(path.name, str(path), source, args=tuple(map(str, args)))


def instead_of_keywords(kwargs: Mapping[str, Any]) -> str:
    """Return what to do with the keyword arguments of a script."""
    return (
        f"Pass {', '.join(sorted(kwargs))} as command-line arguments: "
        "run('train.py', '--epochs=3')."
    )


def _check_source(path: Path, source: bytes) -> None:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as application:
            if "__main__.py" in application.namelist():
                return
    document: Any = None
    with contextlib.suppress(ValueError):
        document = json.loads(source)  # which is often a valid Python expression
    is_notebook = isinstance(document, dict) and "cells" in document
    if is_notebook or path.suffix.lower() == ".ipynb":
        raise ValueError(
            f"{path} is a notebook. Run a function of it, or convert it: jupyter nbconvert --to "
            "script."
        )
    first, _, _ = source.partition(b"\n")
    is_other = path.suffix != ".py" and first.startswith(b"#!") and b"python" not in first
    if isinstance(document, (dict, list)) or is_other or b"\0" in source:
        raise ValueError(f"{path} is not a Python script.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a rank will show them
            compile(source, str(path), "exec", dont_inherit=True)
    except SyntaxError:
        if path.suffix == ".py":
            raise
        raise ValueError(f"{path} is not a Python script.") from None


# Environments

SUFFIXES = (".tar.gz", ".tgz", ".tar", ".zip")  # of the archives that Spark unpacks
# What reading a damaged archive raises.
READ_ERRORS = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError)
_LIBRARY = re.compile(r"(?:\./)?(?P<above>[^/]+/)?lib/python(?P<version>\d+\.\d+)/")


def _names_in(archive: Path) -> Iterator[str]:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            yield from packed.namelist()
    else:
        with tarfile.open(archive) as packed_tar:
            for member in packed_tar:
                yield f"{member.name}/" if member.isdir() else member.name


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive with its links and permissions, as Spark would."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            for member in packed.infolist():
                _extract(packed, member, folder)
    else:
        # The "data" filter would refuse the links to the base interpreter, outside of the folder.
        safely: dict[str, Any] = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}
        with tarfile.open(archive) as packed_tar:
            packed_tar.extractall(folder, **safely)


def _extract(packed: zipfile.ZipFile, member: zipfile.ZipInfo, folder: Path) -> None:
    mode = member.external_attr >> 16
    path = folder / member.filename
    # A file is written through a link of its name; a link is not.
    written = path.parent if stat.S_ISLNK(mode) else path
    if not written.resolve().is_relative_to(folder.resolve()):
        raise zipfile.BadZipFile(f"{member.filename} would be written outside of the folder")
    if stat.S_ISLNK(mode):
        path.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(packed.read(member), os.fsencode(path))
        return
    extracted = packed.extract(member, folder)
    if mode:
        os.chmod(extracted, stat.S_IMODE(mode))


Environment: TypeAlias = str | os.PathLike[str] | Sequence[str] | None
"""A packed environment's path, or requirements; None for the installed interpreter."""
NOTICE_SECONDS = 5.0
"""Seconds after which the user is notified that the environment is not ready."""
PACK = "Pack a virtual environment with venv-pack or conda-pack (-o environment.tar.gz)."


def check_environment(environment: object) -> None:
    """Check the environment before anything is launched."""
    if isinstance(environment, (str, os.PathLike)):
        _check_archive(Path(environment))
    elif isinstance(environment, Sequence) and all(isinstance(entry, str) for entry in environment):
        for requirement in environment:
            _check_requirement(requirement)
    elif environment is not None:
        raise TypeError(
            "environment is the path of a packed environment, or a list of requirements such as "
            f"['einops==0.8.1'], but is {environment!r}."
        )


def ship_environment(session: Session, environment: Environment) -> str | tuple[str, ...] | None:
    """Send a packed environment to every executor, which unpacks it, once while it is unchanged."""
    if not environment:
        return None
    if not isinstance(environment, (str, os.PathLike)):
        return tuple(environment)
    archive = Path(environment).absolute()
    name = f"distributor-environment-{_digest(archive)}"
    send_archive(session, name, archive)
    return name


@contextlib.contextmanager
def prepared_here(
    environment: Environment, env: Mapping[str, str], deadline: float
) -> Iterator[PreparedEnvironment | None]:
    """Prepare an environment on this machine, which is in use within this context."""
    if not environment:
        yield None
        return
    variables = with_default_cache({**os.environ, **env}, conf_cache_dir(Session.active()))
    notice = threading.Timer(
        NOTICE_SECONDS, notify, ["Waiting: the environment is not ready here."]
    )
    notice.daemon = True
    notice.start()
    with contextlib.ExitStack() as stack:
        try:
            prepared = stack.enter_context(_prepared(environment, variables, deadline))
        finally:
            notice.cancel()
        yield prepared


@contextlib.contextmanager
def _prepared(
    environment: str | os.PathLike[str] | Sequence[str],
    variables: Mapping[str, str],
    deadline: float,
) -> Iterator[PreparedEnvironment]:
    beside = [str(folder) for folder in own_folders()]
    if not isinstance(environment, (str, os.PathLike)):
        with use_requirements(tuple(environment), variables, deadline, beside) as prepared:
            yield prepared
        return
    archive = Path(environment).absolute()
    folder = cache_folder(variables) / f"environment-{_digest(archive)}"
    with (
        build_once(folder, lambda folder, lock: unpack(archive, folder), deadline),
        use_packed(folder, variables, deadline, beside) as prepared,
    ):
        yield prepared


def _check_archive(archive: Path) -> None:
    if archive.is_dir():
        raise IsADirectoryError(
            f"environment needs a packed environment, but '{archive}' is a folder. {PACK}"
        )
    if not archive.is_file():
        raise FileNotFoundError(
            f"There is no packed environment '{archive}' (looked from {Path.cwd()}). {PACK}"
        )
    if not archive.name.endswith(SUFFIXES):
        raise ValueError(
            f"environment is '{archive}', but a packed environment ends in {', '.join(SUFFIXES)}. "
            f"{PACK} Requirements are given as a list of strings."
        )
    found, above = _python_in(archive, _digest(archive))
    if found is None:
        raise ValueError(
            f"environment is '{archive}', in which there is no lib/pythonX.Y: it is not a "
            f"packed environment for this system. {PACK}"
        )
    if above:
        raise ValueError(
            f"environment is '{archive}', which has lib and bin in a folder '{above}'. They "
            f"must be at the top. {PACK}"
        )
    ours = "{}.{}".format(*sys.version_info)
    if found != ours:
        raise ValueError(
            f"environment is '{archive}' with Python {found}, and this process runs Python {ours}: "
            f"they cannot read each other's pickles. Pack an environment with Python {ours}."
        )


@functools.cache
def _python_in(archive: Path, digest: str) -> tuple[str | None, str | None]:
    """Return the version of the Python in an archive, and the folder in the archive above it.

    Nothing is read beyond the first file of its library. The folder is None if it is at the top.
    """
    try:
        found = next(filter(None, map(_LIBRARY.match, _names_in(archive))), None)
    except READ_ERRORS as error:
        raise ValueError(
            f"environment is '{archive}', which cannot be read as an archive: {error}. {PACK}"
        ) from error
    return (found["version"], found["above"]) if found else (None, None)


def _check_requirement(requirement: str) -> None:
    if not requirement.strip() or requirement.lstrip().startswith(("-", "#")):
        raise ValueError(
            f"environment lists requirements such as 'einops==0.8.1', but has {requirement!r}. "
            "Options are variables: env={'PIP_INDEX_URL': ...}, or UV_DEFAULT_INDEX for uv."
        )


def _digest(archive: Path) -> str:
    """Return a digest of the archive's path, size and time, without reading it."""
    status = archive.stat()
    state = f"{archive.absolute()}\0{status.st_size}\0{status.st_mtime_ns}"
    return hashlib.sha256(os.fsencode(state)).hexdigest()[:16]
