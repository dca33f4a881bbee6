"""How many slots a cluster has for a run's tasks, who has them, and what to do."""

from __future__ import annotations

from distributor.core.text import counted
from distributor.core.versions import listed
from distributor.launchers.spark.capacity.executors import MAX_EXECUTORS, Executors
from distributor.spark.error_translation import more_slots
from distributor.spark.executor_resources import EXECUTOR_GPUS
from distributor.spark.plan import ClusterPlan
from distributor.spark.session import Session


def executor_size(session: Session) -> str:
    """Return what each executor asks for, by the session's configuration and Spark's defaults."""
    is_contained = session.master.startswith(("yarn", "k8s://"))
    cores = session.conf("spark.executor.cores") or ("1" if is_contained else None)
    gpus = int(float(session.conf(EXECUTOR_GPUS) or 0))
    size = "all cores of a worker" if cores is None else counted(int(cores), "core")
    memory = session.conf("spark.executor.memory") or "1g"
    return f"{size}, {memory} of memory" + (f" and {counted(gpus, 'GPU')}" if gpus else "")


def why_few_slots(session: Session, plan: ClusterPlan, slots: int, ended: str = "") -> str:
    """Return that there are fewer slots than a run has tasks, who has them, and what to do.

    Parameters
    ----------
    ended : str
        What is known of executors that have ended: the cluster has room for them.
    """
    demand = (
        f"{plan.num_tasks} barrier tasks are wanted at once, and the executors of "
        f"{session.master} have room for {slots}."
    )
    return f"{demand} {ended or why_no_more(session)}"


def why_no_more(session: Session) -> str:
    """Return which executors Spark has for the tasks of a run, and what to do about more.

    Empty through Connect, which does not report executors.
    """
    if session.is_connect or session.is_local_master:
        return ""
    executors, size = Executors(session), executor_size(session)
    most = session.conf(MAX_EXECUTORS) if session.allocates_dynamically else None
    limit = f" Spark asks for {most} at most ({MAX_EXECUTORS})." if most else ""
    if not (count := executors.count()):
        return (
            f"No executor has registered. Each asks for {size}.{limit} No machine may have that "
            "much free, another application may hold it, or executors end as they start, most "
            f"often because they cannot reach spark.driver.host={session.conf('spark.driver.host')}"
            ": the page or log of the cluster manager shows which. Ask for smaller executors "
            f"(spark.executor.cores, spark.executor.memory, {EXECUTOR_GPUS}), or add machines."
        )
    hosts = executors.hosts() or {str(session.conf("spark.driver.host"))}
    return (
        f"Spark has {counted(count, 'executor')}, each of {size}, on {listed(hosts)}."
        f"{limit} The cluster may have no more, or another application may hold it. "
        f"{more_slots(session.master)}"
    )


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
