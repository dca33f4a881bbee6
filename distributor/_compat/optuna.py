"""What this package uses of Optuna that is not documented. Optuna is not imported here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def optimize_loop(study: Any) -> Iterator[None]:
    """Let callbacks call ``study.stop`` in this context, as in ``Study.optimize``."""
    if study._thread_local.in_optimize_loop:
        raise RuntimeError("optimize cannot be called by a callback of the same study.")
    study._thread_local.in_optimize_loop, study._stop_flag = True, False
    try:
        yield
    finally:
        study._thread_local.in_optimize_loop = False


def is_stopped(study: Any) -> bool:
    """Return whether ``study.stop`` was called in the context of `optimize_loop`."""
    return bool(study._stop_flag)
