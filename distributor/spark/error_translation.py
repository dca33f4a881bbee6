"""Translates Spark's errors to errors of this package."""

from __future__ import annotations

import re
from collections.abc import Callable

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
    where = _where(text)
    for pattern, make in _MEANINGS:
        if found := re.search(pattern, text, re.DOTALL):
            return make(found, where or (f" of {first_lost}" if first_lost else ""))
    return DistributorError(
        f"Spark ended the job of {counted(num_tasks, 'task')} before any rank reported a failure"
        f"{where}:\n{text[:4000]}"
    )


def _where(text: str) -> str:
    """Return " on" and the host of the task in Spark's message; empty if it names none."""
    found = re.search(spark_texts.LOST_TASK, text)
    return f" on {found.group(1)}" if found else ""


Meaning = Callable[["re.Match[str]", str], DistributorError]


def _not_ready(found: re.Match[str], where: str) -> DistributorError:
    return ExecutorNotReady(found.group(1).strip())


def _too_large(found: re.Match[str], where: str) -> DistributorError:
    return ValueTooLarge(found.group(1).strip())


def _full_disk(found: re.Match[str], where: str) -> DistributorError:
    return DistributorError(
        f"A disk{where} is full: Spark keeps files for executors below spark.local.dir.\n"
        f"{found.group(1)}"
    )


def _not_writable(found: re.Match[str], where: str) -> DistributorError:
    return ExecutorNotReady(
        f"The executor{where} cannot write {found.group(1) or found.group(2)}. It needs a working "
        "folder and temporary folders (/tmp, java.io.tmpdir) that it can write: in a pod whose "
        "root is read-only, mount an emptyDir at each (conf/executor-pod-template.yaml)."
    )


def _other_python(found: re.Match[str], where: str) -> DistributorError:
    return ExecutorNotReady(
        f"The Python worker{where} runs Python {found.group(1)}, the driver {found.group(2)}. "
        f"{SET_PYTHON}"
    )


def _no_module(found: re.Match[str], where: str) -> DistributorError:
    return ExecutorNotReady(
        f"The Python worker{where} has no {found.group(1)}, which this package needs there. "
        f"{SET_PYTHON}"
    )


def _no_interpreter(found: re.Match[str], where: str) -> DistributorError:
    return ExecutorNotReady(f"There is no Python at '{found.group(1)}'{where}. {SET_PYTHON}")


def _lost(found: re.Match[str], where: str) -> DistributorError:
    reason = _reason(found.group(1))
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


def _reason(text: str) -> str:
    """Return why an executor was lost, on one line."""
    brief = re.sub(spark_texts.CONTAINER_STATUSES, "", text, flags=re.DOTALL)
    ended = re.search(spark_texts.POD_ENDED, text)
    reason = f"{brief} {ended.group(0) if ended else ''}"
    return " ".join(reason.split())[:1000].rstrip(". ")


def _ended(found: re.Match[str], where: str) -> DistributorError:
    return ApplicationEnded(f"The Spark application has ended ({found.group(0)}). {NEXT} {RESTART}")


def _server_failed(found: re.Match[str], where: str) -> DistributorError:
    return ApplicationEnded(
        f"The Spark Connect server answers '{found.group(0)}', and its log says why. Most often "
        f"its Spark application has ended. {NEXT} {RESTART}"
    )


def _no_slots(found: re.Match[str], where: str) -> DistributorError:
    return StartTimeout(
        "Spark started none of the run's tasks, and gave up: a barrier job's tasks start together, "
        f"and the cluster has too few slots for them. {more_slots()}"
    )


def _python_error(found: re.Match[str], where: str) -> DistributorError:
    return DistributorError(f"A task failed{where} before its ranks ran: {found.group(1).strip()}")


_MEANINGS: list[tuple[str, Meaning]] = [
    (r"ExecutorNotReady: ([^\n]*(?:\n {4}[^\n]*)*)", _not_ready),  # indented lines belong to it
    (r"ValueTooLarge: (.*?)(?:\n|$)", _too_large),
    (spark_texts.CONTEXT_STOPPED, _ended),
    (spark_texts.SERVER_FAILED, _server_failed),
    (spark_texts.TOO_FEW_SLOTS, _no_slots),
    (spark_texts.FULL_DISK, _full_disk),
    (spark_texts.NOT_WRITABLE, _not_writable),
    (spark_texts.OTHER_PYTHON, _other_python),
    (spark_texts.NO_MODULE, _no_module),
    (spark_texts.NO_PACKAGE, _no_module),
    (spark_texts.NO_INTERPRETER, _no_interpreter),
    (spark_texts.LOST_EXECUTOR, _lost),
    (spark_texts.CRASHED_WORKER, _lost),
    (
        r"spark/task/task\.py.*\n(\w[\w.]*: .*?)" + spark_texts.END_OF_ERROR,
        _python_error,
    ),
]
