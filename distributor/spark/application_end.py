"""Whether a session's application has ended, and who ended it."""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

from distributor._compat import pyspark as private
from distributor._compat.spark_texts import TOO_MANY_EXECUTOR_FAILURES
from distributor.errors import ApplicationEnded, NodeLost

NOTICE_SECONDS = 2.0
"""Seconds in which Spark notices that the cluster manager has ended an application."""
POLL_SECONDS = 0.2
ANSWER_SECONDS = 30.0
"""Seconds for a Connect server to answer. PySpark would try a dead one for ten minutes."""
YARN_ENDED = ("FINISHED", "FAILED", "KILLED")
NEXT = "Its session can run nothing more: stop it (spark.stop()) if it is not, and make a new one."
RESTART = "With Spark Connect, restart the server first."
NO_ANSWER = (
    f"The Spark Connect server has not answered for {ANSWER_SECONDS:g} s. Check that it runs and "
    "can be reached; if its session is lost, make a new one."
)
JVM_ENDED = (
    "The Spark application has ended: the JVM of this process no longer answers, and PySpark "
    "starts no other one. Start a new process: in a notebook, restart the kernel."
)
MORE_FAILURES = (
    "Spark ends an application once more executors have failed than spark.executor.maxNumFailures. "
    "If executors are often lost, as on spot instances, raise it for the next session, or let old "
    "failures expire: spark.executor.failuresValidityInterval=1h."
)


def check_not_ended(spark: Any) -> None:
    """Check that the application of a ``SparkSession`` has not ended."""
    if end := end_of(spark):
        raise ApplicationEnded(end)


@contextlib.contextmanager
def end_explained(spark: Any, *, is_last: bool = False) -> Iterator[None]:
    """Raise `ApplicationEnded` in place of the errors that the end of the application causes."""
    try:
        yield
    except Exception as error:
        deadline = time.monotonic() + NOTICE_SECONDS
        while (end := end_of(spark, asks_manager=True)) is None:
            if not (is_last and _may_be_the_end(error, spark)) or time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)
        if end is NO_ANSWER:
            raise  # a server that is only slow does not hide the error
        raise ApplicationEnded(end) from None


def _may_be_the_end(error: Exception, spark: Any) -> bool:
    """Return whether an executor was lost that YARN or Kubernetes may have ended with the rest."""
    is_loss = isinstance(error, NodeLost) and not error.silent
    return is_loss and spark.sparkContext.master.startswith(("yarn", "k8s://"))


def end_of(spark: Any, *, asks_manager: bool = False) -> str | None:
    """Return that a session's application has ended, and why; None while it has not."""
    if private.is_connect_session(spark):
        return _end_of_server(spark)
    context = spark.sparkContext
    try:
        is_stopped = private.is_stopped(context)
        asks_yarn = (is_stopped or asks_manager) and context.master == "yarn"
        reported = _yarn_end(context) if asks_yarn else ""
        if is_stopped and context.master.startswith("k8s://"):
            reported = MORE_FAILURES  # Kubernetes does not report why
    except Exception:
        return JVM_ENDED
    if not (is_stopped or reported):
        return None
    return " ".join(filter(None, ["The Spark application has ended.", reported, NEXT]))


def _yarn_end(context: Any) -> str:
    """Return what YARN reports of an application that has ended; empty while it has not."""
    try:
        state, diagnostics = private.yarn_ending(context, context.applicationId)
    except Exception:
        return ""  # the resource manager does not answer
    if state not in YARN_ENDED:
        return ""
    said = " ".join(diagnostics.split())
    hint = MORE_FAILURES if re.search(TOO_MANY_EXECUTOR_FAILURES, said) else ""
    ending = f"YARN reports {state}{f': {said}' if said else ''}".rstrip(".")
    return f"{ending}. {hint}".rstrip()


def _end_of_server(spark: Any) -> str | None:
    """Return that the Connect server does not serve a session any more; None if it does."""
    answer: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def ask() -> None:
        try:
            spark.conf.get("spark.app.id")
            answer.put(None)
        except Exception as error:
            reason = f"The Spark Connect server no longer serves this session: {error}."
            answer.put(f"{reason} {NEXT} {RESTART}")

    threading.Thread(target=ask, name="spark-connect-check", daemon=True).start()
    try:
        return answer.get(timeout=ANSWER_SECONDS)
    except queue.Empty:
        return NO_ANSWER
