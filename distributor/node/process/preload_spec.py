"""What a zygote has loaded, and whether that still fits a run."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from distributor.node.process.interpreter import Interpreter

_READ_AT_START = (
    "ATEN_", "BLIS_", "DYLD_", "GLIBC_", "GOMP_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_",
    "NPY_", "NUMEXPR_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_",
    "TORCH_", "VECLIB_",
)  # fmt: skip
"""Variables with these beginnings are read when an interpreter or a library starts."""
THREADS = "OMP_NUM_THREADS"
"""Read at import too, but a forked rank can make up for it."""


@dataclass(frozen=True, kw_only=True)
class PreloadSpec:
    """What a warm process has loaded, and under which conditions.

    Parameters
    ----------
    executable : str
        Its interpreter.
    path : tuple of str
        Its ``sys.path``.
    variables : tuple of pairs of str
        The environment variables that only a fresh start would read, with digests of their values:
        a command line, which all users can read, carries this.
    preload : tuple of str
        The user's modules that it has imported, beside those that every rank needs.
    """

    executable: str
    path: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]
    preload: tuple[str, ...]

    @classmethod
    def of(
        cls,
        environment: Mapping[str, str],
        preload: tuple[str, ...],
        interpreter: Interpreter | None = None,
    ) -> PreloadSpec:
        """Write down what a rank with this environment needs; by default in this interpreter."""
        interpreter = interpreter or Interpreter.current()
        matters = (
            (name, hashlib.sha256(value.encode(errors="surrogateescape")).hexdigest()[:16])
            for name, value in environment.items()
            if name.startswith(_READ_AT_START) and name != THREADS
        )
        return cls(
            executable=interpreter.executable,
            path=interpreter.path,
            variables=tuple(sorted(matters)),
            preload=preload,
        )

    def covers(self, wanted: PreloadSpec) -> bool:
        """Tell whether a process made so can fork what is wanted."""
        same = replace(self, preload=()) == replace(wanted, preload=())
        return same and set(wanted.preload) <= set(self.preload)

    def left_to(self, wanted: PreloadSpec) -> tuple[str, ...]:
        """Give what the next one is to preload too: others may still want what this one had."""
        return self.preload if wanted.executable == self.executable else ()


def loaded_files(since: int = sys.maxsize) -> dict[str, tuple[int, int]]:
    """Note the files that this process has imported, each with its change time and size.

    Parameters
    ----------
    since : int
        When the imports began, in ns. What has changed later may not be what was imported, and is
        noted so that it counts as changed.
    """
    origins = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    files = {path: found for path in origins if path and (found := _state(path))}
    now = time.time_ns()
    return {
        path: (0, 0) if since <= changed_at <= now else (changed_at, size)
        for path, (changed_at, size) in files.items()
    }


def changed(files: Mapping[str, tuple[int, int]]) -> bool:
    """Tell whether any of these files is no longer what it was."""
    return any(_state(path) != before for path, before in files.items())


def _state(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
