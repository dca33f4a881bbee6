"""Keeps Spark's own log of a run off the driver's streams while the run lasts.

The run reports its failure with the rank's own traceback. Spark's log would show it four more
times, as Java stacks around our encoded report, and its progress bar would stand where our
messages begin.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

from distributor._compat.cpython import future_warning_ignored
from distributor._compat.pyspark import (
    PANDAS_WARNING,
    TASK_ERROR_LOGGERS,
    progress_bar,
    restore_loggers,
    switch_loggers_off,
)

LATE_SECONDS = 3.0
"""Seconds after a failure until the last of its tasks has ended."""
BAR_SECONDS = 0.2
"""Seconds between two removals of Spark's progress bar, which stays away for half a second."""

_lock = threading.Lock()
_runs = 0
_levels: dict[str, Any] = {}
"""What the loggers had before the first of the runs; None for a logger without its own level."""


@contextmanager
def quiet(session: Any) -> Iterator[None]:
    """Silence Spark's account of a run, and restore what was changed.

    Parameters
    ----------
    session : Session
        Where the run takes place. Through Connect nothing is done: its server's log is not ours.
    """
    if session.is_connect:
        yield
        return
    context = session.spark.sparkContext
    with ExitStack() as stack:
        stack.enter_context(_log_levels(context))
        stack.enter_context(_no_progress_bar(context))
        yield


@contextmanager
def _log_levels(context: Any) -> Iterator[None]:
    """Switch the loggers off. Several runs may do so at once, and the last restores them."""
    global _runs
    with _lock:
        _runs += 1
        if _runs == 1:
            with suppress(Exception):  # another logging system than Log4j 2
                _levels.update(switch_loggers_off(context, TASK_ERROR_LOGGERS))
    try:
        yield
    except BaseException:
        # Spark tells of the other tasks, which it kills then, when they have ended.
        later = threading.Timer(LATE_SECONDS, _release, [context])
        later.daemon = True
        later.start()
        raise
    else:
        _release(context)


def _release(context: Any) -> None:
    global _runs
    with _lock:
        _runs -= 1
        if _runs == 0:
            with suppress(Exception):  # the JVM may have gone
                restore_loggers(context, _levels)


@contextmanager
def _no_progress_bar(context: Any) -> Iterator[None]:
    """Remove Spark's progress bar again and again: it has no switch while Spark runs."""
    bar = progress_bar(context)
    if bar is None:
        yield
        return
    ended = threading.Event()

    def remove() -> None:
        with suppress(Exception):  # Spark may have stopped
            while not ended.wait(BAR_SECONDS):
                bar.finishAll()

    thread = threading.Thread(target=remove, name="spark-progress-bar", daemon=True)
    bar.finishAll()
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(Exception):
            bar.finishAll()


def no_warning() -> AbstractContextManager[None]:
    """Ignore the warning that PySpark issues for a call of ours, on this thread alone."""
    return future_warning_ignored(PANDAS_WARNING)
