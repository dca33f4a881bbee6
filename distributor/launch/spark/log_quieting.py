"""Keeps Spark's own log of a run off the driver's streams while the run lasts.

The run reports its failure with the rank's own traceback. Spark's log would show it four more
times, as Java stacks around our encoded report, and its progress bar would stand where our
messages begin.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

LOGGERS = ("org.apache.spark.executor.Executor", "org.apache.spark.scheduler.TaskSetManager")
"""Those that log the exception that ends a task: in the driver's JVM for ``local[n]``, and the
scheduler's account of it. Executors of their own keep it in their log files."""
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
        stack.enter_context(_log_levels(context._jvm))
        stack.enter_context(_no_progress_bar(context._jsc.sc()))
        yield


@contextmanager
def _log_levels(jvm: Any) -> Iterator[None]:
    """Switch the loggers off. Several runs may do so at once, and the last restores them."""
    global _runs
    with _lock:
        _runs += 1
        if _runs == 1:
            with suppress(Exception):  # another logging system than Log4j 2
                _switch_off(jvm)
    try:
        yield
    except BaseException:
        # Spark tells of the other tasks, which it kills then, when they have ended.
        later = threading.Timer(LATE_SECONDS, _release, [jvm])
        later.daemon = True
        later.start()
        raise
    else:
        _release(jvm)


def _release(jvm: Any) -> None:
    global _runs
    with _lock:
        _runs -= 1
        if _runs == 0:
            with suppress(Exception):  # the JVM may have gone
                _restore(jvm)


def _switch_off(jvm: Any) -> None:
    log4j = jvm.org.apache.logging.log4j
    configured = log4j.LogManager.getContext(False).getConfiguration().getLoggers()
    for name in LOGGERS:
        own = configured.get(name)
        _levels[name] = own.getExplicitLevel() if own is not None else None
        log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)


def _restore(jvm: Any) -> None:
    log4j = jvm.org.apache.logging.log4j
    context = log4j.LogManager.getContext(False)
    while _levels:
        name, level = _levels.popitem()
        own = context.getConfiguration().getLoggers().get(name)
        if own is None or not log4j.Level.OFF.equals(own.getExplicitLevel()):
            continue  # whoever has set another level meanwhile wants that one
        if level is None:
            context.getConfiguration().removeLogger(name)
            context.updateLoggers()
        else:
            log4j.core.config.Configurator.setLevel(name, level)


@contextmanager
def _no_progress_bar(context: Any) -> Iterator[None]:
    """Remove Spark's progress bar again and again: it has no switch while Spark runs."""
    bar = context.progressBar()
    if bar.isEmpty():
        yield
        return
    ended = threading.Event()

    def remove() -> None:
        with suppress(Exception):  # Spark may have stopped
            while not ended.wait(BAR_SECONDS):
                bar.get().finishAll()

    thread = threading.Thread(target=remove, name="spark-progress-bar", daemon=True)
    bar.get().finishAll()
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(Exception):
            bar.get().finishAll()


class _InThisCall(type):
    """The type of a warning's category that stands for another one, within `no_warning` alone."""

    def __subclasscheck__(cls, category: type) -> bool:
        return getattr(_calls, "quiet", False) and issubclass(category, FutureWarning)


class _OfOurCall(FutureWarning, metaclass=_InThisCall):
    pass


_calls = threading.local()
_quiet_calls = 0
PANDAS = "PySpark does not yet fully support pandas"
"""How the one warning begins that PySpark gives for each call with pandas 3."""


@contextmanager
def no_warning() -> Iterator[None]:
    """Leave out what PySpark warns of for a call of ours, on this thread, and for no other call.

    The filters of ``warnings`` are the process's, so `warnings.catch_warnings` would change them
    for other threads. The one added here matches nothing but on a thread within this context
    manager, and the last such thread removes it.
    """
    global _quiet_calls
    with _lock:
        _quiet_calls += 1
        # Again each time: whoever leaves catch_warnings meanwhile has put the old filters back.
        warnings.filterwarnings("ignore", message=PANDAS, category=_OfOurCall)
    _calls.quiet = True
    try:
        yield
    finally:
        _calls.quiet = False
        with _lock:
            _quiet_calls -= 1
            if not _quiet_calls:
                for entry in [each for each in warnings.filters if each[2] is _OfOurCall]:
                    warnings.filters.remove(entry)  # type: ignore[attr-defined]
