"""Creates the program that ranks run from the arguments of ``run``."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import os
import sys
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from distributor.core.module_search import find_spec
from distributor.serialization import pickling
from distributor.serialization.pickle_diagnostics import name_of
from distributor.serialization.program import Call, Module, Program, Script


def program_of(
    train_object: Callable[..., Any] | str | os.PathLike[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Program:
    """Return the program for the arguments of ``run``."""
    if isinstance(train_object, Module):
        return replace(train_object, args=tuple(map(str, args)))
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


def check_runs(function: Callable[..., Any]) -> None:
    """Check that a call of a function runs its body."""
    while isinstance(function, functools.partial):
        function = function.func
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
    return Script(path.name, str(path), tuple(map(str, args)), source)


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
    document = _json_of(source)
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


def _json_of(source: bytes) -> Any:
    """Return the object of a JSON file, which is often a valid Python expression; else None."""
    try:
        return json.loads(source)
    except ValueError:
        return None
