"""Ends a rank's process: ends the program's objects, and skips the interpreter's teardown."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import os
import re
import stat
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from distributor._compat.cpython import forget_exit_handlers
from distributor.core.module_search import MAIN_MODULES, PACKAGE_FOLDERS

_STANDARD_LIBRARY = str(Path(os.__file__).parent)
_BUFFERED = (io.BufferedWriter, io.BufferedRandom)
_CODE = (ModuleType, FunctionType, type)
_ANY_FILE: type = io.IOBase.__mro__[1]  # the class in C, which has no slow check for subclasses

kept_until_end: list[object] = []
"""What keeps the program's globals, as a module does. `end_objects` releases it."""


def end_objects() -> None:
    """End the program's objects, as the interpreter's teardown does after all exit handlers.

    Files are written, finalizers run and temporary files are removed, while all modules still work.
    Only objects of the program are released: those of its main module, and of other modules that
    were not installed. Libraries keep theirs, such as torch its process groups, whose destructors
    may block or abort.
    """
    files = list(_open_files())
    # First of all, because errors of a file that is freed are not reported.
    _flush(files, io.TextIOWrapper)
    _flush(files, *_BUFFERED)
    kept_until_end.clear()
    threading.excepthook = lambda _: None  # of daemon threads, whose globals go
    candidates = {*MAIN_MODULES, *_preloaded, *(sys.modules.keys() - _known)}
    names = [name for name in candidates if _is_of_program(name)]
    modules = [weakref.ref(sys.modules[name]) for name in names]
    for name in names:
        # An import must not run a module again. Some code reads attributes of the main module.
        sys.modules[name] = ModuleType(name) if name in MAIN_MODULES else None  # type: ignore[assignment]
    forget_exit_handlers()
    # The collector may end a file before a compressed one that writes to it. So files outlast all
    # other objects, and are closed from the outside in, but for those that would keep a module.
    files = [file for file in files if type(file).__module__ not in names]
    gc.collect()  # finalizers still find all of their modules' globals
    # Something else can keep a whole module, such as a thread.
    if _release_values(modules, names):
        gc.collect()
    _close_files()
    _close_hdf5()


def remember_modules() -> None:
    """Note which of the modules that exist now are the program's.

    A forked process that looked at each of them would have to copy the pages that they are in.
    """
    global _known, _preloaded
    _preloaded = {name: vars(sys.modules[name]) for name in sys.modules if _is_of_program(name)}
    _known = frozenset(sys.modules)


_known: frozenset[str] = frozenset()
# The globals of modules that the garbage collector never frees in processes that are forked.
_preloaded: dict[str, dict[str, Any]] = {}


def _is_of_program(name: str) -> bool:
    """Return whether this is a main module, or one in Python that was not installed."""
    module = sys.modules.get(name)
    if not isinstance(module, ModuleType) or name in MAIN_MODULES:
        return isinstance(module, ModuleType)
    path = vars(module).get("__file__")
    if not isinstance(path, str) or not path.endswith((".py", ".pyc")):
        return False
    # The innermost: the folders of executors can be below that of an installed PySpark.
    folders = [folder for folder in sys.path if folder and path.startswith(folder + os.sep)]
    folder = max(folders, key=len, default="")
    is_installed = folder == _STANDARD_LIBRARY or folder.endswith(PACKAGE_FOLDERS)
    return not is_installed and name.partition(".")[0] != __name__.partition(".")[0]


def _release_values(modules: list[weakref.ref[ModuleType]], names: list[str]) -> bool:
    """Drop the values of globals, the latest first, and return whether there were any.

    Finalizers may need the code. Functions also have globals if their module no longer exists.
    """
    namespaces = [vars(module) for reference in modules if (module := reference())]
    namespaces += _preloaded.values()
    namespaces += [
        found for found in gc.get_objects() if type(found) is dict and _is_of(found, names)
    ]
    found_values = False
    for namespace in namespaces:
        for name in reversed(list(namespace)):
            value = namespace[name]
            if not (name.startswith("__") or value is None or isinstance(value, _CODE)):
                namespace[name] = value = None
                found_values = True
    return found_values


def _is_of(namespace: dict[str, Any], names: list[str]) -> bool:
    name = namespace.get("__name__") if "__builtins__" in namespace else None
    return isinstance(name, str) and name in names


def _open_files() -> Iterator[Any]:
    """Yield the regular files that this process writes; to flush a pipe could block."""
    for file in [found for found in gc.get_objects() if issubclass(type(found), _ANY_FILE)]:
        with contextlib.suppress(Exception):  # closed, or of a class that has no descriptor
            if file.writable() and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                yield file


def _flush(files: list[Any], *kinds: type[Any]) -> None:
    """Write what files of these kinds hold back."""
    for file in files:
        if isinstance(file, kinds) and not file.closed:
            _end(file.flush, file)


def _close_files() -> None:
    """Close the files to which something still refers; compressed ones are incomplete until then.

    Files are only flushed if they have nothing else to write: the standard streams are such.
    """
    files = list(_open_files())
    _flush(files, io.TextIOWrapper)
    for file in files:
        if not isinstance(file, (io.TextIOWrapper, io.FileIO, *_BUFFERED)):
            _end(file.close, file)
    _flush(files, *_BUFFERED)


def _close_hdf5() -> None:
    """Close the files of HDF5, which an exit handler in C would do."""
    if {"h5py", "netCDF4", "tables"}.isdisjoint(sys.modules) or sys.platform != "linux":
        return
    maps = Path("/proc/self/maps").read_text()
    for library in {*re.findall(r"/\S*libhdf5[-.]\S*$", maps, re.MULTILINE)}:
        _end(ctypes.CDLL(library).H5close, library)


def _end(end: Callable[[], object], what: object) -> None:
    """Flush or close an open file, and print an error, as the interpreter does at its end."""
    try:
        end()
    except Exception:
        print_error(f"Exception ignored at the end of the program in: {what!r}\n")
        print_error(traceback.format_exc())


def end_process(exit_code: int) -> NoReturn:
    """End the program's objects, then the process."""
    try:
        end_objects()
    except BaseException:
        print_error(traceback.format_exc())
    finally:
        exit_process(exit_code)


def exit_process(exit_code: int) -> NoReturn:
    """Exit without the interpreter's teardown, which costs time and can abort in C++ code."""
    flush_streams()
    os._exit(exit_code)


def flush_streams() -> None:
    """Flush what Python and C code have printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def exit_code_of(error: SystemExit) -> int:
    """Return the exit code that the interpreter would use; print a message as it would."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print_error(f"{error.code}\n")
    return 1


def print_error(text: str) -> None:
    """Print to stderr, if there still is one."""
    with contextlib.suppress(Exception):  # closed, or replaced by the user and broken
        sys.stderr.write(text)


def exit_forked_child(error: BaseException | None) -> NoReturn:
    """End a process that the user's program forked and that returned from the program.

    It must not record an outcome in place of its rank.
    """
    if isinstance(error, SystemExit):
        exit_process(exit_code_of(error))
    if error is not None:
        print_error("".join(traceback.format_exception(error)))
    exit_process(0 if error is None else 1)
