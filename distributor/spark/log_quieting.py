"""Silences what Spark logs and shows about a run while it lasts.

The run's error has the rank's own traceback. Spark's log would show it four more times, as Java
stacks around the encoded failures, and its progress bar would overwrite the line on which messages
begin.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from distributor._compat.cpython import future_warning_ignored
from distributor._compat.pyspark import (
    PANDAS_WARNING,
    TASK_ERROR_LOGGERS,
    TASK_ERRORS,
    drop_messages,
    progress_bar,
    stages_with_tag,
)

FAILED_TASKS_SECONDS = 3.0
"""Seconds after a failure until the last task of the run has ended."""
BAR_SECONDS = 0.2
"""Seconds between two removals of Spark's progress bar: each job that ends lets it return."""
FIRST_STAGE_SECONDS = 0.02
"""Seconds between two questions for the stages of a job that has just been submitted."""
HIDDEN_SECONDS = 30.0
"""Seconds that Spark's progress bar stays away if this process is too busy to remove it again."""

_lock = threading.Lock()
_stages: dict[str, set[int]] = {}
"""The stages of the runs whose errors Spark does not log, by the tags of their jobs."""


@contextmanager
def quiet(session: Any, tag: str) -> Iterator[None]:
    """Silence what Spark logs of the jobs with a tag, and its progress bar, within this context."""
    if session.is_connect:
        yield
        return
    with no_progress_bar(session), _no_task_errors(session.spark.sparkContext, tag):
        yield


@contextmanager
def _no_task_errors(context: Any, tag: str) -> Iterator[None]:
    def look() -> None:
        _note(context, tag, stages_with_tag(context, tag))

    seconds = 0.0
    try:
        with _repeated(look, lambda: BAR_SECONDS if _stages.get(tag) else FIRST_STAGE_SECONDS):
            yield
    except BaseException:
        # Spark then kills the other tasks, and logs each when it has ended.
        seconds = FAILED_TASKS_SECONDS
        raise
    finally:
        later = threading.Timer(seconds, _note, [context, tag, set()])
        later.daemon = True
        later.start() if seconds else later.run()


@contextmanager
def no_progress_bar(session: Any) -> Iterator[None]:
    """Hide Spark's progress bar again and again: it cannot be switched off while Spark runs."""
    bar = None
    with suppress(Exception):  # another version of Spark may draw it in another way
        bar = None if session.is_connect else progress_bar(session.spark.sparkContext)
    if bar is None:
        yield
        return
    bar.hide(HIDDEN_SECONDS)
    try:
        with _repeated(lambda: bar.hide(HIDDEN_SECONDS), lambda: BAR_SECONDS):
            yield
    finally:
        with suppress(Exception):
            bar.show()


@contextmanager
def _repeated(action: Callable[[], object], pause: Callable[[], float]) -> Iterator[None]:
    """Call a function again and again, on a thread, after a pause of so many seconds."""
    ended = threading.Event()

    def repeat() -> None:
        with suppress(Exception):  # Spark may have stopped, or has another logging system
            while not ended.wait(pause()):
                action()

    thread = threading.Thread(target=repeat, name="spark-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _note(context: Any, tag: str, stages: set[int]) -> None:
    """Have Spark drop the errors of the tasks of these stages, and of those of other runs."""
    with _lock:
        if stages == _stages.get(tag, set()):
            return
        _stages[tag] = stages
        if not stages:
            del _stages[tag]
        numbers = "|".join(map(str, sorted(set().union(*_stages.values()))))
        pattern = rf"(?s)({TASK_ERRORS}) .*?in stage ({numbers})\..*" if numbers else ""
        with suppress(Exception):  # the JVM may have ended
            drop_messages(context, TASK_ERROR_LOGGERS, pattern)


def no_warning() -> AbstractContextManager[None]:
    """Ignore the warning that PySpark issues for a call in this context, on this thread alone."""
    return future_warning_ignored(PANDAS_WARNING)
