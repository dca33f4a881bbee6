"""Why a cluster has no room for a run's tasks, as far as Spark reports, and what to do."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from dataclasses import dataclass

from distributor._compat import pyspark as private
from distributor.core.text import counted
from distributor.launchers.spark.capacity.container_memory import memory_overhead
from distributor.launchers.spark.capacity.executors import MAX_EXECUTORS, Executors
from distributor.launchers.spark.capacity.machines import Capacity, Machines, in_mebibytes
from distributor.launchers.spark.capacity.standalone_master import MASTER, UI_PORT, ask_master
from distributor.launchers.spark.capacity.yarn import YarnCluster, ask_yarn
from distributor.spark.error_translation import more_slots
from distributor.spark.executor_resources import EXECUTOR_GPUS, TASK_GPUS
from distributor.spark.plan import ClusterPlan
from distributor.spark.session import Session
from distributor.spark.sizes import size_in_bytes

SMALLER = (
    "Ask for smaller executors (spark.executor.cores, spark.executor.memory, "
    f"{EXECUTOR_GPUS}), or add machines that have room for one."
)


@dataclass(frozen=True)
class ExecutorSize:
    """What each executor asks for, by the session's configuration.

    Parameters
    ----------
    cores : int or None
        The number of cores; None for all that a worker has.
    memory, overhead : int
        The heap and what Spark adds to it (MiB).
    gpus : int
        The number of GPUs.
    """

    cores: int | None
    memory: int
    overhead: int
    gpus: int

    @classmethod
    def of(cls, session: Session) -> ExecutorSize:
        """Return the size by the session's configuration, with Spark's defaults."""
        contained = session.master.startswith(("yarn", "k8s://"))
        cores = session.conf("spark.executor.cores") or ("1" if contained else None)
        memory = _mebibytes(session, "spark.executor.memory") or 1024
        return cls(
            cores=None if cores is None else int(cores),
            memory=memory,
            overhead=memory_overhead(session.conf)[0] // 2**20 if contained else 0,
            gpus=int(float(session.conf(EXECUTOR_GPUS) or 0)),
        )

    @property
    def minimum(self) -> Capacity:
        """What a worker must have for one executor."""
        return Capacity(self.cores or 1, self.memory + self.overhead, self.gpus)

    def __str__(self) -> str:
        cores = "all cores of a worker" if self.cores is None else counted(self.cores, "core")
        overhead = f" + {in_mebibytes(self.overhead)} of overhead" if self.overhead else ""
        gpus = f" and {counted(self.gpus, 'GPU')}" if self.gpus else ""
        return f"{cores}, {in_mebibytes(self.memory)} of memory{overhead}{gpus}"


def why_few_slots(session: Session, plan: ClusterPlan, slots: int, ended: str = "") -> str:
    """Return why there are fewer slots than a run has tasks, and what to do."""
    demand = (
        f"{plan.num_tasks} barrier tasks are wanted at once, and the executors of "
        f"{session.master} have room for {slots}."
    )
    count, size = Executors(session).count(), ExecutorSize.of(session)
    if ended:  # so there is room for executors
        return f"{demand} {ended}"
    if count == 0:
        found = f"No executor has registered. Each asks for {size}."
    elif slots == 0:
        found = f"None of {counted(count, 'executor')} has room for {_task(session, plan)}."
    else:
        found = f"There is room on {counted(count, 'executor')}, each of {size}."
    return " ".join([demand, found, _why_no_more(session, size, count)])


def why_no_more(session: Session) -> str:
    """Return why Spark may not have started further tasks of a run, and what to do.

    Empty through Connect, which does not report executors.
    """
    if session.is_connect or session.is_local_master:
        return ""
    count = Executors(session).count()
    found = f"Spark has {counted(count, 'executor')}." if count else "No executor has registered."
    most = session.conf(MAX_EXECUTORS) if session.allocates_dynamically else None
    limit = f" Spark asks for {most} at most ({MAX_EXECUTORS})." if most else ""
    return f"{found}{limit} {_why_no_more(session, ExecutorSize.of(session), count)}"


def why_none_fits(session: Session) -> str:
    """Return why no machine of the cluster is large enough for an executor of a run.

    Empty if one is, or if the cluster's manager does not report its machines.
    """
    size, machines, noun = ExecutorSize.of(session), None, "node"
    minimum = size.minimum
    if session.is_connect:
        return ""
    if session.master.startswith(MASTER):
        machines, noun = _ask_master_of(session), "worker"
    elif session.master == "yarn" and (cluster := ask_yarn(session)):
        machines, minimum = cluster.nodes, cluster.container(minimum)
    if machines is None or not machines.total:
        return ""
    if too_small := _why_too_small(machines, minimum, noun):
        return f"The run asks for executors of {size}. {too_small}"
    return ""


def why_not_started(session: Session, other_tasks: int, *, has_room: bool) -> str:
    """Return what may keep Spark from starting the tasks of a submitted job, and what to do."""
    if other_tasks:
        return (
            f"Other jobs of this application run {counted(other_tasks, 'task')}: wait for them to "
            "end, or add executors or cores to the application."
        )
    if has_room:
        return "The executors have room for them: Spark may still be preparing the job."
    return (
        "A barrier job's tasks start together, once there is a free slot for each: too few may "
        f"exist, or others may hold them. {more_slots(session.master)}"
    )


def _why_no_more(session: Session, size: ExecutorSize, count: int) -> str:
    """Return why there are no more executors than `count`, as far as the manager reports it."""
    none_started = count == 0
    if session.master.startswith(MASTER):
        return _why_by_master(session, size, none_started=none_started)
    if session.master == "yarn" and (cluster := ask_yarn(session)):
        return f"{cluster.queue} {_why_by_yarn(session, cluster, size, count)}"
    if session.master.startswith("k8s://") and (pods := _waiting_pods(session)):
        return pods
    if none_started:
        return (
            "No node may have that much free, others may hold it, or executors end as they "
            "start, most often because they cannot reach spark.driver.host: the cluster "
            f"manager shows which. {SMALLER}"
        )
    return f"The cluster may have no more, or others hold it. {more_slots(session.master)}"


def _why_by_master(session: Session, size: ExecutorSize, *, none_started: bool) -> str:
    master = _ask_master_of(session)
    if master is None:
        return (
            "No worker may have that much free, or another application holds it: the master's web "
            f"page says so. {SMALLER if none_started else more_slots(MASTER)}"
        )
    if none_started and master.own:
        return (
            f"Workers run executors of this application ({counted(master.own, 'core')}) that have "
            "not reached this driver: they are still starting, or cannot connect to "
            f"spark.driver.host={session.conf('spark.driver.host')}."
        )
    if not master.total:
        return "The master has no worker: start one, and see that it reaches the master."
    if size.gpus and not any(worker.gpus for worker in master.total):
        return (
            f"None of {counted(len(master.total), 'worker')} has GPUs: set "
            "spark.worker.resource.gpu.amount and spark.worker.resource.gpu.discoveryScript where "
            "they are started, or run on CPUs in a session without "
            f"{EXECUTOR_GPUS}."
        )
    return _why_by_machines(master, size.minimum, "worker", none_started=none_started)


def _ask_master_of(session: Session) -> Machines | None:
    port = int(session.conf("spark.master.ui.port") or UI_PORT)
    return ask_master(session.master, port, session.conf("spark.app.id"))


def _why_by_yarn(session: Session, cluster: YarnCluster, size: ExecutorSize, count: int) -> str:
    if cluster.executors > count:
        return (
            f"It has started {counted(cluster.executors, 'container')} for executors: the others "
            "are still starting, cannot connect to "
            f"spark.driver.host={session.conf('spark.driver.host')}, or their node is lost, which "
            f"YARN notices after {cluster.expiry:g} s ({private.NODE_EXPIRY})."
        )
    minimum = cluster.container(size.minimum)
    return _why_by_machines(cluster.nodes, minimum, "node", none_started=count == 0)


def _why_by_machines(
    machines: Machines, minimum: Capacity, noun: str, *, none_started: bool
) -> str:
    """Return why no machine has room for a further executor, which needs `minimum`."""
    add = SMALLER if none_started else more_slots(MASTER if noun == "worker" else "")
    if not machines.total:
        return f"The cluster has no {noun} that runs."
    if too_small := _why_too_small(machines, minimum, noun):
        return too_small
    if any(machine.holds(minimum) for machine in machines.free):
        return f"A {noun} has room for one more: it may still be starting." + (
            "" if none_started else f" {add}"
        )
    if machines.others:
        held = ", ".join(machines.others)
        return (
            f"No {noun} has that much free; other applications hold cores: {held}. Wait for them "
            "to end, or ask for fewer ranks or smaller executors."
        )
    return f"No {noun} has that much free. {add}"


def _why_too_small(machines: Machines, minimum: Capacity, noun: str) -> str:
    if any(machine.holds(minimum) for machine in machines.total):
        return ""
    number = counted(len(machines.total), noun)
    largest = max(machines.total, key=lambda each: (each.gpus, each.cores, each.memory))
    return f"None of {number} is that large; the largest has {largest}. {SMALLER}"


def _waiting_pods(session: Session) -> str:
    """Return why executor pods wait, as Kubernetes reports it; empty if that is not known."""
    namespace = session.conf("spark.kubernetes.namespace") or "default"
    context = session.spark.sparkContext
    with contextlib.suppress(Exception):
        reasons = private.waiting_pods(context, namespace, context.applicationId)
        pods = [f"{counted(n, 'pod')} ({reason})" for reason, n in Counter(reasons).items()]
        return f"Kubernetes has not started {' and '.join(pods)}. {SMALLER}" if pods else ""
    return ""


def _task(session: Session, plan: ClusterPlan) -> str:
    needs = f"a task of {counted(int(session.conf('spark.task.cpus') or 1), 'core')}"
    gpus = plan.profile_gpus or math.ceil(float(session.conf(TASK_GPUS) or 0))
    return f"{needs} and {counted(gpus, 'GPU')}" if plan.use_gpu and gpus else needs


def _mebibytes(session: Session, key: str) -> int | None:
    text = session.conf(key)
    return None if text is None else size_in_bytes(text, "m") // 2**20
