"""Executors of a standalone cluster that end while runs wait for them."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

from distributor._compat import pyspark as private
from distributor._compat.spark_texts import EXECUTOR_ADDED, EXECUTOR_ENDED
from distributor.core.text import counted
from distributor.spark.session import Session

_lock = threading.Lock()
_logs: dict[Any, tuple[private.RecordedLog, int]] = {}
"""By application: what its JVM logs of the master's reports, and how many runs read it."""


@contextlib.contextmanager
def ended_executors(session: Session) -> Iterator[Callable[[], str]]:
    """Yield a function that returns which executors have ended in this context, and what to do.

    An executor that cannot reach the driver does not belong to the application yet. The driver
    learns of it from the master alone. Other cluster managers, and Connect, report nothing.
    """
    log = None
    if session.master.startswith(("spark://", "local-cluster")) and not session.is_connect:
        log = _opened(session.spark.sparkContext)
    if log is None:
        yield str
        return
    address = session.conf("spark.driver.host") or ""
    try:
        yield lambda: _describe(log.text, address)
    finally:
        _close(session.spark.sparkContext)


def _opened(context: Any) -> private.RecordedLog | None:
    with _lock, contextlib.suppress(Exception):  # another logging framework than Log4j 2
        log, readers = _logs.get(context) or (
            private.RecordedLog(context, private.APPLICATION_LOGGER),
            0,
        )
        _logs[context] = log, readers + 1
        return log
    return None


def _close(context: Any) -> None:
    with _lock:
        log, readers = _logs.pop(context)
        if readers > 1:
            _logs[context] = log, readers - 1
            return
    with contextlib.suppress(Exception):  # the JVM has ended
        log.close()


def _describe(log: str, address: str) -> str:
    """Return what a log says of executors that ended by themselves; empty if there are none."""
    ended = re.findall(EXECUTOR_ENDED, log)
    if not ended:
        return ""
    executor, reason = ended[-1]
    host = dict(re.findall(EXECUTOR_ADDED, log)).get(executor)
    return (
        f"{counted(len(ended), 'executor')} ended during this wait; the last one"
        f"{f' on {host}' if host else ''}: {reason}. Its output is in the folder of its worker, in "
        f"work/{executor}/stderr (SPARK_WORKER_DIR replaces work). Most often executors cannot "
        f"reach the driver: they connect to spark.driver.host={address}, which must be an address "
        "of this machine that they can reach (spark.driver.bindAddress is the one that is bound "
        "here), and to the ports spark.driver.port and spark.driver.blockManager.port. Otherwise "
        "they lack something on their host, such as Java or a passwd entry of their user."
    )
