"""The executors of an application: how many tasks they can run, and how much they can return."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
import weakref
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from distributor._compat import pyspark as private
from distributor._compat.pyspark import EXECUTOR_ADDED, EXECUTOR_ENDED
from distributor.control.run import NodesLeaving
from distributor.core.resources import format_bytes
from distributor.core.text import counted, listed
from distributor.node.agent.node_warnings import JVM, MIB, PYTHON_DAEMON, PYTHON_WORKER, min_memory
from distributor.screen.messages import warn_once
from distributor.spark.application import end_of
from distributor.spark.session import EXECUTOR_GPUS, MEMORY, OVERHEAD, Session, size_in_bytes

MAX_EXECUTORS = "spark.dynamicAllocation.maxExecutors"
EXECUTORS = "spark.executor.instances"
HEAP_SHARE = 4
"""A job's rows may take one part in so many of a heap."""

_HOSTS: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()
"""The hosts of an application's executors, by their ids."""


@dataclass(frozen=True)
class Executors:
    """The executors of a session's application.

    A Spark Connect client does not know them: each method says what it returns then.

    Parameters
    ----------
    session : Session
        The session.
    """

    session: Session

    def count(self) -> int:
        """Return how many executors can take tasks; 0 through Connect.

        Spark still knows executors that are lost while it waits for the reason.
        """
        if self.session.is_connect or self.session.is_local_master:
            return 0
        context = self.session.spark.sparkContext
        ids = private.executor_ids(context)
        return len(ids) - len(private.inactive_executors(context, ids))

    def hosts(self) -> set[str]:
        """Return the hosts of the executors, without the driver's; none through Connect."""
        if self.session.is_connect:
            return set()
        hosts = private.executor_hosts(self.session.spark.sparkContext)
        return set(hosts) - {self.session.conf("spark.driver.host")}

    def leaving(
        self,
        hosts: Container[str] | None,
        find: Callable[..., list[str]] = private.inactive_executors,
    ) -> dict[str, str]:
        """Return the executors that Spark is about to end, and their hosts (none by Connect)."""
        if self.session.is_connect or self.session.is_local_master:
            return {}
        try:
            context = self.session.spark.sparkContext
            host_of = _HOSTS.setdefault(context, {})
            ids = private.executor_ids(context)
            for executor in ids:
                if not host_of.get(executor):
                    host_of[executor] = private.executor_host(context, executor)
            on_hosts = [each for each in ids if hosts is None or host_of[each] in hosts]
            return {each: host_of[each] for each in find(context, on_hosts)}
        except Exception as error:
            if end_of(self.session.spark) is None:  # otherwise the end of the job shows why
                warn_once(
                    "Spark does not answer which executors it is about to end, so that ranks are "
                    f"not notified of it ({type(error).__name__})."
                )
            return {}

    def slots(self, profile: Any = None) -> int | None:
        """Return how many tasks the registered executors can run at once; None through Connect."""
        if self.session.is_connect:
            return None
        return private.max_concurrent_tasks(self.session.spark.sparkContext, profile)

    def max_slots(self, gpus_per_task: int = 0) -> int | None:
        """Return how many tasks the application can ever run at once by its configuration.

        None if that depends on the cluster. The GPUs are those of tasks of a resource profile.
        """
        conf, master = self.session.conf, self.session.master
        if self.session.is_local_master:
            return self.slots()
        cpus = int(conf("spark.task.cpus") or 1)
        limits = []
        if found := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]", master):
            limits.append(int(found[1]) * (int(found[2]) // cpus))
        if master.startswith("spark://") and (max_cores := conf("spark.cores.max")):
            limits.append(int(max_cores) // cpus)
        cores, count = self.session.executor_cores, None
        if self.session.allocates_dynamically:
            count = conf(MAX_EXECUTORS)
        elif self.session.is_contained:
            count = conf(EXECUTORS) or "2"  # Spark's default
        if cores is not None and count is not None:
            each = int(cores) // cpus
            if gpus_per_task:
                each = min(each, int(float(conf(EXECUTOR_GPUS) or 0)) // gpus_per_task)
            limits.append(int(count) * each)
        return min(limits, default=None)

    def max_result_bytes(self) -> int:
        """Return how many bytes a job can return to the driver as rows.

        Spark refuses more than ``spark.driver.maxResultSize``. With small heaps it runs out of
        memory long before, because both ends hold a task's rows several times over.
        """
        conf = self.session.conf
        keys = ("spark.driver.memory", MEMORY)
        heaps = [size_in_bytes(conf(key) or "1g", "m") // HEAP_SHARE for key in keys]
        limit = size_in_bytes(conf("spark.driver.maxResultSize") or "1g", "b")
        return min(heaps + ([limit] if limit else []))  # 0 means no limit


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


# Ranks live outside the executor's Java heap. On YARN and Kubernetes the container's bound is heap,
# overhead, off-heap memory and PySpark's memory; the standalone cluster sets no bound.

FACTOR, MINIMUM = "spark.executor.memoryOverheadFactor", "spark.executor.minMemoryOverhead"
KUBERNETES_FACTOR = "spark.kubernetes.memoryOverheadFactor"
PYSPARK = "spark.executor.pyspark.memory"


def container_shortage(
    conf: Callable[[str], str | None], tasks: int, ranks_per_task: int, *, warm: bool
) -> str | None:
    """Return why the executors' containers are too small for a run, and what to set."""
    if not (conf("spark.master") or "").startswith(("yarn", "k8s://")):
        return None
    overhead, source = _overhead(conf)
    room = overhead + size_in_bytes(conf(PYSPARK) or "0", "m")
    # However Spark places the tasks, at least one executor has this many.
    tasks_here = math.ceil(tasks / int(conf(EXECUTORS) or 2))
    ranks = tasks_here * ranks_per_task
    of_spark = JVM + PYTHON_DAEMON + tasks_here * PYTHON_WORKER
    needed = of_spark + min_memory(ranks, tasks_here, warm=warm)
    if needed <= room:
        return None
    wanted = math.ceil((needed - room + overhead) / MIB)
    return (
        f"An executor's container has {format_bytes(room)} beside its Java heap ({source}), and "
        f"{counted(ranks, 'rank')} in it, with Spark's own processes, need at least "
        f"{format_bytes(needed)}: Python and torch alone, without model, data or CUDA. The cluster "
        "manager may kill the executor (exit codes 137 and 143). Make the session with "
        f"{OVERHEAD}={wanted}m, and what your training needs on top."
    )


def _overhead(conf: Callable[[str], str | None]) -> tuple[int, str]:
    """Return the overhead of executors on YARN and Kubernetes (bytes), and what sets it."""
    if value := conf(OVERHEAD):
        return size_in_bytes(value, "m"), f"{OVERHEAD}={value}"
    heap = conf(MEMORY) or "1g"
    on_kubernetes = (conf("spark.master") or "").startswith("k8s://")
    general = conf(FACTOR)
    factor = general or (on_kubernetes and conf(KUBERNETES_FACTOR)) or "0.1"
    minimum = conf(MINIMUM) or "384m"
    size = max(int(float(factor) * size_in_bytes(heap, "m")), size_in_bytes(minimum, "m"))
    return size, f"{OVERHEAD} is unset: {factor} of {MEMORY}={heap}, at least {minimum}"


POLL_SECONDS = 1.0
"""Seconds between two looks at which executors are about to end."""


class DecommissioningWatch:
    """Finds executors that Spark began to decommission during an attempt.

    Parameters
    ----------
    executors : Executors
        The application's executors.
    attempt : int
        The number of the attempt. Executors that were about to end before a further attempt began
        have no task of it, and are ignored.
    """

    def __init__(self, executors: Executors, attempt: int) -> None:
        self._leaving = partial(executors.leaving, find=private.decommissioned_executors)
        self._known = set(self._leaving(None)) if attempt else set()
        self._poll_at = 0.0

    def poll(self, hosts: Collection[str]) -> NodesLeaving | None:
        """Return the hosts, among these, of executors that are new; ask at most once a second."""
        now = time.monotonic()
        if now <= self._poll_at:
            return None
        self._poll_at = now + POLL_SECONDS
        leaving = self._leaving(hosts)
        new = {each: leaving[each] for each in leaving.keys() - self._known}
        self._known |= new.keys()
        if not new:
            return None
        text = f"Spark is about to end {listed('executor', sorted(new))}: the ranks are notified."
        return NodesLeaving(frozenset(new.values()), text, frozenset(new))
