"""Loads a zygote's modules, describes them, and decides whether they still fit a run."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distributor.core.module_search import Location, not_on_path
from distributor.node.process.interpreter import Interpreter

_PREFIXES_READ_AT_START = (
    "ATEN_", "BLIS_", "DYLD_", "GLIBC_", "GOMP_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_",
    "NPY_", "NUMEXPR_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_",
    "TORCH_", "VECLIB_",
)  # fmt: skip
"""Prefixes of variables that are read only when an interpreter or a library starts."""
THREADS_VARIABLE = "OMP_NUM_THREADS"
"""Is read at import too, but a forked rank can apply it later."""
TRACEBACK_CHARS = 4 * 1024
"""Characters that are kept at each end of a long traceback, which must fit into a packet."""

FileStates = dict[str, tuple[int, int]]
"""Modification time (ns) and size (bytes) of files, by path."""


@dataclass(frozen=True, kw_only=True)
class PreloadSpec:
    """What a zygote has loaded, and under which conditions.

    Parameters
    ----------
    executable : str
        Its interpreter.
    path : tuple of str
        Its ``sys.path``.
    variables : tuple of pairs of str
        The environment variables that only a fresh start would read, with digests of their values:
        this travels on a command line, which all users can read.
    preload : tuple of str
        The user's modules that it has imported in addition to those that every rank needs.
    located : tuple of Location
        Where those of them are that an import does not find.
    """

    executable: str
    path: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]
    preload: tuple[str, ...]
    located: tuple[Location, ...]

    @classmethod
    def of(
        cls,
        environment: Mapping[str, str],
        preload: tuple[str, ...],
        interpreter: Interpreter | None = None,
    ) -> PreloadSpec:
        """Return what a rank with this environment needs.

        Parameters
        ----------
        environment : mapping of str to str
            The environment of the rank.
        preload : tuple of str
            Modules of the user's to import in advance.
        interpreter : Interpreter, optional
            The rank's interpreter; by default that of this process.
        """
        interpreter = interpreter or Interpreter.current()
        variables = (
            (name, hashlib.sha256(value.encode(errors="surrogateescape")).hexdigest()[:16])
            for name, value in environment.items()
            if name.startswith(_PREFIXES_READ_AT_START) and name != THREADS_VARIABLE
        )
        return cls(
            executable=interpreter.executable,
            path=interpreter.path,
            variables=tuple(sorted(variables)),
            preload=preload,
            located=tuple(dict.fromkeys(not_on_path(preload))),
        )

    def covers(self, wanted: PreloadSpec) -> bool:
        """Return whether a zygote with this spec can fork ranks that need another spec."""
        return (
            replace(self, preload=(), located=()) == replace(wanted, preload=(), located=())
            and set(wanted.preload) <= set(self.preload)
            and set(wanted.located) <= set(self.located)
        )

    def preload_for_successor(self, wanted: PreloadSpec) -> tuple[str, ...]:
        """Return the modules that the next zygote should import too: other runs may need them."""
        return self.preload if wanted.executable == self.executable else ()


class Imports:
    """Imports modules, and records which environment variables each import has set."""

    def __init__(self) -> None:
        self._start_environment = dict(os.environ)
        self._variables: dict[str, dict[str, str]] = {}  # by module

    def add(self, modules: Sequence[str], optional: str = "") -> str | None:
        """Import modules; return why the first that failed did. The optional package may fail."""
        for name in modules:
            # What is loaded already may have set any of the variables that earlier imports left.
            before = self._start_environment if name in sys.modules else dict(os.environ)
            try:
                importlib.import_module(name)
            except BaseException:  # a module may even exit
                if name.partition(".")[0] != optional:
                    return f"{name} cannot be imported:\n{_shortened(traceback.format_exc())}"
            self._variables.setdefault(name, dict(os.environ.items() - before.items()))
        return None

    def variables(self, modules: Sequence[str]) -> dict[str, str]:
        """Return the variables that are set where only these of the modules are imported."""
        return {k: v for name in modules for k, v in self._variables[name].items()}


def _shortened(text: str) -> str:
    if len(text) <= 2 * TRACEBACK_CHARS:
        return text
    return f"{text[:TRACEBACK_CHARS]}\n...\n{text[-TRACEBACK_CHARS:]}"


def loaded_files(since: int = sys.maxsize) -> FileStates:
    """Return the state of the files that this process has imported, and of archives on its path.

    Parameters
    ----------
    since : int
        When the imports began, in ns since the epoch. A file that was modified later may not be
        what was imported, so its recorded state is one that counts as changed.
    """
    origins = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    # Of an archive on the path, a list of its content is kept.
    origins |= {getattr(each, "archive", None) for each in list(sys.path_importer_cache.values())}
    files = {path: state for path in origins if path and (state := _state_of(path))}
    now = time.time_ns()
    return {
        path: (0, 0) if since <= modified_at <= now else (modified_at, size)
        for path, (modified_at, size) in files.items()
    }


def have_changed(files: FileStates) -> bool:
    """Return whether any of these files no longer has the recorded state."""
    return any(_state_of(path) != recorded for path, recorded in files.items())


def _state_of(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
