"""Silences what Spark logs and shows about a run while it lasts.

The run's error has the rank's own traceback. Spark's log would show it four more times, as Java
stacks around the encoded failures, and its progress bar would overwrite the line on which messages
begin.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

from distributor._compat.cpython import future_warning_ignored
from distributor._compat.pyspark import (
    INTERRUPTED,
    PANDAS_WARNING,
    TASK_ERROR_LOGGERS,
    progress_bar,
    restore_loggers,
    switch_loggers_off,
)

FAILED_TASKS_SECONDS = 3.0
"""Seconds after a failure until the last task of the run has ended."""
BAR_SECONDS = 0.2
"""Seconds between two removals of Spark's progress bar: each job that ends lets it return."""
HIDDEN_SECONDS = 30.0
"""Seconds that Spark's progress bar stays away if this process is too busy to remove it again."""

_lock = threading.Lock()
_runs = 0
_levels: dict[str, Any] = {}
"""The loggers' levels before the first of the runs; None for a logger without its own level."""


@contextmanager
def quiet(session: Any) -> Iterator[None]:
    """Silence Spark's log and progress bar within this context."""
    if session.is_connect:
        yield
        return
    context = session.spark.sparkContext
    with ExitStack() as stack:
        stack.enter_context(_log_levels(context))
        stack.enter_context(no_progress_bar(session))
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
        # Spark then kills the other tasks, and logs each when it has ended.
        later = threading.Timer(FAILED_TASKS_SECONDS, _release, [context])
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
            with suppress(Exception):  # the JVM may have ended
                restore_loggers(context, _levels)


@contextmanager
def no_progress_bar(session: Any) -> Iterator[None]:
    """Hide Spark's progress bar again and again: it cannot be switched off while Spark runs."""
    bar = None
    with suppress(Exception):  # another version of Spark may draw it in another way
        bar = None if session.is_connect else progress_bar(session.spark.sparkContext)
    if bar is None:
        yield
        return
    ended = threading.Event()

    def hide() -> None:
        with suppress(Exception):  # Spark may have stopped
            while not ended.wait(BAR_SECONDS):
                bar.hide(HIDDEN_SECONDS)

    bar.hide(HIDDEN_SECONDS)
    thread = threading.Thread(target=hide, name="spark-progress-bar", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(Exception):
            bar.show()


@contextmanager
def no_log_of_interrupts() -> Iterator[None]:
    """Drop what Py4J logs of calls that Ctrl-C interrupts: the run ends, and says so."""

    def is_shown(record: logging.LogRecord) -> bool:
        return record.msg not in INTERRUPTED.get(record.name, ()) or not _is_of_interrupt(record)

    loggers = [logging.getLogger(name) for name in INTERRUPTED]
    for logger in loggers:
        logger.addFilter(is_shown)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_shown)


def _is_of_interrupt(record: logging.LogRecord) -> bool:
    """Return whether a logged error is of an interrupt, or of PySpark's call in its handler."""
    error = record.exc_info[1] if record.exc_info else None
    causes = (error, error.__context__) if error else ()
    return any(isinstance(cause, (KeyboardInterrupt, RuntimeError)) for cause in causes)


def no_warning() -> AbstractContextManager[None]:
    """Ignore the warning that PySpark issues for a call in this context, on this thread alone."""
    return future_warning_ignored(PANDAS_WARNING)
