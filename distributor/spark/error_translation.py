"""Translates Spark's errors to errors of this package."""

from __future__ import annotations

import re

from distributor._compat import pyspark as spark_texts
from distributor.core.text import counted
from distributor.errors import (
    ApplicationEnded,
    DistributorError,
    ExecutorNotReady,
    NodeLost,
    StartTimeout,
    ValueTooLarge,
)
from distributor.spark.application import NEXT, RESTART

SET_PYTHON = (
    "Set PYSPARK_PYTHON (spark.pyspark.python for spark-submit and distributor run) to a Python "
    "that has torch and pyarrow and is of the driver's version, at the same path on every node, "
    "before the Spark session is made."
)

MORE_MEMORY = (
    "The container's limit is the sum of spark.executor.memory, the Java heap, and "
    "spark.executor.memoryOverhead, from which the ranks take theirs: make the session with a "
    "larger spark.executor.memoryOverhead."
)


def more_slots(master: str = "") -> str:
    """Return what to do if a cluster has too few slots; `master` is its URL, if known."""
    cores_max = "spark.cores.max, " if master.startswith("spark://") else ""
    return (
        "Ask for fewer ranks, or add executors or cores to the application "
        f"(spark.executor.instances, spark.executor.cores, {cores_max}spark.task.cpus)."
    )


def explain(error: BaseException, num_tasks: int, first_lost: str = "") -> DistributorError:
    """Return an error of this package for a Spark job whose ranks reported no failure."""
    text = str(error)
    host = re.search(spark_texts.LOST_TASK, text)
    on_host = f" on {host[1]}" if host else ""
    where = on_host or (f" of {first_lost}" if first_lost else "")
    for pattern, kind, template in _MEANINGS:
        if found := re.search(pattern, text, re.DOTALL):
            message = template.format(found[0], *found.groups(""), where=where).strip()
            if kind is not NodeLost:
                return kind(message)
            if times := re.search(spark_texts.FAILED_TASK, text):
                message = f"a task failed {times[1]} times (spark.task.maxFailures): {message}"
            return _node_lost(message, where)
    return DistributorError(
        f"Spark ended the job of {counted(num_tasks, 'task')} before any rank reported a failure"
        f"{on_host}:\n{text[:4000]}"
    )


def _node_lost(text: str, where: str) -> NodeLost:
    """Return the error for what Spark says of an executor or a Python worker that was lost."""
    brief = re.sub(spark_texts.CONTAINER_STATUSES, "", text, flags=re.DOTALL)
    pod = re.search(spark_texts.POD_ENDED, text)
    reason = " ".join(f"{brief} {pod[0] if pod else ''}".split())[:1000].rstrip(". ")
    ended = f"The node{where} ended without reporting a failure: {reason}."
    if re.search(spark_texts.RECLAIMED, reason):
        host = where.rpartition(" ")[2] or "unknown host"
        return NodeLost(f"{ended} The cluster manager took it back.", reclaimed=(host,))
    if re.search(spark_texts.OUT_OF_MEMORY, reason):
        return NodeLost(f"{ended} {MORE_MEMORY}")
    return NodeLost(
        f"{ended} Most often its host or its container ran out of memory, or the cluster manager "
        "took it back. The logs of the executor, and of its host's kernel, show more."
    )


_NO_MODULE = "The Python worker{where} has no {1}, which this package needs there. " + SET_PYTHON
_MEANINGS: list[tuple[str, type[DistributorError], str]] = [
    # Indented lines belong to the message.
    (r"ExecutorNotReady: ([^\n]*(?:\n {4}[^\n]*)*)", ExecutorNotReady, "{1}"),
    (r"ValueTooLarge: (.*?)(?:\n|$)", ValueTooLarge, "{1}"),
    (
        spark_texts.CONTEXT_STOPPED,
        ApplicationEnded,
        "The Spark application has ended ({0}). " + f"{NEXT} {RESTART}",
    ),
    (
        spark_texts.SERVER_FAILED,
        ApplicationEnded,
        "The Spark Connect server answers '{0}', and its log says why. Most often its Spark "
        f"application has ended. {NEXT} {RESTART}",
    ),
    (
        spark_texts.TOO_FEW_SLOTS,
        StartTimeout,
        "Spark started none of the run's tasks, and gave up: a barrier job's tasks start together, "
        f"and the cluster has too few slots for them. {more_slots()}",
    ),
    (
        spark_texts.FULL_DISK,
        DistributorError,
        "A disk{where} is full: Spark keeps files for executors below spark.local.dir.\n{1}",
    ),
    (
        spark_texts.NOT_WRITABLE,
        ExecutorNotReady,
        "The executor{where} cannot write {1}{2}. It needs a working folder and temporary folders "
        "(/tmp, java.io.tmpdir) that it can write: in a pod whose root is read-only, mount an "
        "emptyDir at each (conf/executor-pod-template.yaml).",
    ),
    (
        spark_texts.OTHER_PYTHON,
        ExecutorNotReady,
        "The Python worker{where} runs Python {1}, the driver {2}. " + SET_PYTHON,
    ),
    (spark_texts.NO_MODULE, ExecutorNotReady, _NO_MODULE),
    (spark_texts.NO_PACKAGE, ExecutorNotReady, _NO_MODULE),
    (
        spark_texts.NO_INTERPRETER,
        ExecutorNotReady,
        "There is no Python at '{1}'{where}. " + SET_PYTHON,
    ),
    (spark_texts.LOST_EXECUTOR, NodeLost, "{1}"),
    (spark_texts.CRASHED_WORKER, NodeLost, "{1}"),
    (
        r"spark/task/task\.py.*\n(\w[\w.]*: .*?)" + spark_texts.END_OF_ERROR,
        DistributorError,
        "A task failed{where} before its ranks ran: {1}",
    ),
]
"""Of the error of a job: a pattern in its text, and the error and message that it stands for.

A message has the whole match as ``{0}``, its groups from ``{1}`` on, and ``{where}``.
"""
