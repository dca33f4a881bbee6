"""Plans a run by the resources of this machine or of Spark: how many tasks, and which GPUs."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace

from distributor.core.gpus import gpu_names, missing_gpus
from distributor.core.spelling import Spelling
from distributor.core.text import counted
from distributor.node.agent.worker_env import mask_entries, visible_devices
from distributor.screen.messages import warn
from distributor.spark.session import (
    DISCOVERY_SCRIPT,
    EXECUTOR_GPUS,
    TASK_GPUS,
    VENDOR,
    Session,
    refusal,
)

GPUS_OF_NESTED_RUNS = "DISTRIBUTOR_NESTED_GPUS"
"""The variable of a rank that has the GPUs of runs that it starts; by default they are its own."""


@dataclass(frozen=True)
class LocalPlan:
    """Ranks on this machine.

    Parameters
    ----------
    num_processes : int
        How many ranks, at most as many as there are GPUs if GPUs are used.
    gpus : tuple of str or None
        Entries for ``CUDA_VISIBLE_DEVICES``; if there are none, every GPU is hidden. None leaves
        the variable as it is.
    """

    num_processes: int
    gpus: tuple[str, ...] | None


@dataclass(frozen=True)
class ClusterPlan:
    """Tasks on a Spark cluster, each of them one node of the run.

    Parameters
    ----------
    num_tasks : int
        The number of Spark tasks.
    ranks_per_task : int
        The number of ranks that each task starts.
    use_gpu : bool
        Whether ranks use the GPUs that Spark assigned to their task.
    profile_gpus : int
        The GPUs of each task in a resource profile, if the configuration requests none; else 0.
    driver_gpus : tuple of str
        With ``local[n]``, one of the driver's GPUs for each rank, because tasks have no GPUs of
        their own there.
    barrier : bool
        Whether the tasks are those of a barrier stage, which Spark starts together.
    """

    num_tasks: int
    ranks_per_task: int
    use_gpu: bool
    profile_gpus: int = 0
    driver_gpus: tuple[str, ...] = ()
    barrier: bool = True

    @property
    def num_ranks(self) -> int:
        return self.num_tasks * self.ranks_per_task

    def with_ranks(self, number: int) -> ClusterPlan:
        """Return the plan with so many ranks."""
        tasks = number // self.ranks_per_task
        return replace(self, num_tasks=tasks, driver_gpus=self.driver_gpus[:number])


def plan_local(
    min_processes: int,
    max_processes: int,
    use_gpu: bool,
    gpu_type: str | None,
) -> LocalPlan:
    """Plan a run on this machine, with as many ranks as possible."""
    if not use_gpu:
        return LocalPlan(max_processes, ())
    gpus = driver_gpus(Session.active())
    if not gpus:
        raise refusal(
            "GPUs were unable to be found on the driver. Looked at Spark's driver resources, "
            "CUDA_VISIBLE_DEVICES and the NVIDIA driver. For CPUs {run_on_cpus}."
        )
    if len(gpus) < min_processes < max_processes:
        raise RuntimeError(
            f"At least {min_processes} GPUs are needed, but this machine has {len(gpus)}."
        )
    used = min(max_processes, len(gpus))
    if gpu_type is not None and (lack := missing_gpus(gpu_type, used)):
        raise RuntimeError(f"On this machine {lack}.")
    return LocalPlan(used, gpus[:used])


def plan_cluster(
    session: Session,
    num_processes: int,
    use_gpu: bool,
    pool: str | None,
    barrier: bool | None = None,
    *,
    gpu_sharing: bool = False,
) -> ClusterPlan:
    """Plan a run on Spark's executors.

    Parameters
    ----------
    session : Session
        The session.
    num_processes : int
        How many ranks there are at most.
    use_gpu : bool
        Whether each rank has a GPU.
    pool : str or None
        The pool of the fair scheduler.
    barrier : bool, optional
        Whether the tasks are those of a barrier stage; by default they are if Spark allows it.
    gpu_sharing : bool, default False
        Whether tasks have the fraction of a GPU that the configuration requests.
    """
    if pool is not None and (why := session.why_no_pools()):
        raise refusal("{pool} is {value!r}, but {why}.", value=pool, why=why)
    if barrier and not runs_barrier_stages(session):
        raise refusal(
            "{barrier} is True, but 'spark.dynamicAllocation.enabled' is 'true', and Spark "
            "then runs no barrier stages. Leave {barrier} unset, for ranks in the tasks of an "
            "ordinary job, or make the session with dynamic allocation off."
        )
    if session.requested:
        _check_requested(session, use_gpu=use_gpu)
    plan = _plan_tasks_of(session, num_processes, use_gpu, gpu_sharing)
    return replace(plan, barrier=runs_barrier_stages(session) if barrier is None else barrier)


def runs_barrier_stages(session: Session) -> bool:
    """Return whether Spark runs barrier stages: not while dynamic allocation is on."""
    return session.is_local_master or not session.allocates_dynamically


def _plan_tasks_of(
    session: Session, num_processes: int, use_gpu: bool, gpu_sharing: bool
) -> ClusterPlan:
    if not use_gpu:
        return ClusterPlan(num_processes, 1, use_gpu=False)
    amount = _amount(session, TASK_GPUS)
    if session.is_local_master:
        return _plan_local_master(session, num_processes, amount)
    if amount >= 1 or (amount and gpu_sharing):
        plan = _plan_tasks(num_processes, amount)
        return replace(plan, profile_gpus=plan.ranks_per_task if session.requested else 0)
    return _plan_profile(session, num_processes)


def _check_requested(session: Session, *, use_gpu: bool) -> None:
    """Check that Spark can start executors for one run."""
    if runs_barrier_stages(session):
        raise refusal(
            "{executor_resources} needs dynamic allocation, without which executors have the "
            "resources of the session: make the session with "
            "spark.dynamicAllocation.enabled=true, or with these properties."
        )
    if not session.supports_profiles():
        raise refusal(
            "{executor_resources} needs PySpark 4, here and on a Spark Connect server; found "
            "{version}.",
            version=session.spark.version,
        )
    if not use_gpu and session.requested.get(EXECUTOR_GPUS):
        raise refusal(
            "{executor_resources} has '{key}', but the ranks run on CPUs: leave it out.",
            key=EXECUTOR_GPUS,
        )
    needed = (
        [DISCOVERY_SCRIPT, VENDOR] if session.master.startswith("k8s://") else [DISCOVERY_SCRIPT]
    )
    missing = [key for key in needed if not session.conf(key)]
    if missing and use_gpu and session.is_contained:
        raise refusal(
            "{executor_resources} requests GPUs, and '{key}' is unset: an executor on {master} "
            "needs it for its GPUs (conf/get_gpus.sh, nvidia.com). Add it to "
            "{executor_resources}.",
            key=missing[0],
            master=session.master,
        )


def check_launch(session: Session, plan: ClusterPlan) -> None:
    """Check what PySpark's class accepts when it is made, and what then prevents a run."""
    if not plan.use_gpu or plan.profile_gpus:
        return
    if session.is_local_master:
        _check_driver_gpus(session, plan)
    elif not assigns_gpus(session):
        raise refusal(
            f"'{TASK_GPUS}' was set after Spark's start, and so Spark assigns no GPUs to "
            "tasks. Set it when the cluster is made (conf/spark-defaults-gpu.conf), or "
            "{run_on_cpus}."
        )


def assigns_gpus(session: Session) -> bool:
    """Return whether Spark's scheduler assigns GPUs to tasks; through Connect this is unknown."""
    return session.is_connect or bool(session.scheduler_conf(TASK_GPUS))


def driver_gpus(session: Session | None) -> tuple[str, ...]:
    """Return the driver's GPUs: Spark's, or those of CUDA_VISIBLE_DEVICES, or the machine's."""
    mask = os.environ.get(GPUS_OF_NESTED_RUNS, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if session is not None and (addresses := session.driver_gpu_addresses()):
        return visible_devices(addresses, mask)
    if mask is not None:
        return mask_entries(mask)
    return tuple(str(index) for index in range(len(gpu_names())))


def _amount(session: Session, key: str) -> float:
    """Return the number that a property has; 0 if it is not set."""
    text = session.conf(key) or "0"
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"'{key}' must be a number, but is {text!r}.") from None


def _plan_tasks(num_processes: int, amount: float) -> ClusterPlan:
    """Plan tasks with the GPUs that the configuration requests for each."""
    ranks_per_task = max(1, int(amount))
    if num_processes % ranks_per_task:
        raise refusal(
            "{api} '{num_processes}' value ({ranks}) must be a multiple of '{key}' ({each}) value.",
            ranks=num_processes,
            key=TASK_GPUS,
            each=ranks_per_task,
        )
    return ClusterPlan(num_processes // ranks_per_task, ranks_per_task, use_gpu=True)


def _plan_local_master(session: Session, num_processes: int, amount: float) -> ClusterPlan:
    """Plan tasks in the driver's JVM, which share the driver's GPUs.

    The amount is that of the session: PySpark's class reads it too, and the scheduler does not.
    """
    if session.scheduler_conf(TASK_GPUS):
        raise RuntimeError(
            f"'{TASK_GPUS}' is set, but a {session.master} master cannot schedule GPUs and would "
            "never start a task. Leave it unset: ranks then share the driver's GPUs."
        )
    plan = _plan_tasks(num_processes, amount)
    plan = replace(plan, driver_gpus=driver_gpus(session)[:num_processes])
    if not amount:
        _check_driver_gpus(session, plan)
    return plan


def _check_driver_gpus(session: Session, plan: ClusterPlan) -> None:
    if (gpus := len(plan.driver_gpus)) < plan.num_ranks:
        unset = "" if session.conf(TASK_GPUS) else f" ('{TASK_GPUS}' was unset)"
        raise refusal(
            "On {master} the driver needs a GPU for each of the {ranks} ranks, but it has "
            "{found}{unset}. For CPUs {run_on_cpus}.",
            master=session.master,
            ranks=plan.num_ranks,
            found=counted(gpus, "GPU"),
            unset=unset,
        )


def _plan_profile(session: Session, num_processes: int) -> ClusterPlan:
    per_executor = int(_amount(session, EXECUTOR_GPUS))
    if not per_executor or not session.supports_profiles():
        found = f"'{EXECUTOR_GPUS}' is {session.conf(EXECUTOR_GPUS) or 'unset too'}"
        if fraction := session.conf(TASK_GPUS):
            raise refusal(
                "'{key}' is {fraction}, so that ranks would share GPUs, and a resource profile "
                "with whole GPUs needs PySpark 4 ({found}). Make the session with '{key}' "
                "set to 1, or set {gpu_sharing} to True (NCCL refuses ranks that share a GPU).",
                key=TASK_GPUS,
                fraction=fraction,
                found=found,
            )
        raise refusal(
            "'{key}' was unset, so gpu usage is unavailable ({found}). Set both when the "
            "cluster is made (conf/spark-defaults-gpu.conf), or {run_on_cpus}.",
            key=TASK_GPUS,
            found=found,
        )
    fits_one = num_processes <= per_executor
    ranks_per_task = num_processes if fits_one else math.gcd(num_processes, per_executor)
    return ClusterPlan(
        num_processes // ranks_per_task,
        ranks_per_task,
        use_gpu=True,
        profile_gpus=ranks_per_task,
    )


def check_encryption(session: Session, spelling: Spelling) -> None:
    """Check that an API may run on this cluster, whose traffic between ranks is not encrypted."""
    if (session.conf("spark.ssl.enabled") or "false").lower() != "true":
        return
    api, key = spelling.api, spelling.ignore_ssl
    found = (
        f"This cluster has TLS encryption enabled; however, {api} does not support data "
        "encryption in transit."
    )
    consequence = (
        "Please note this will cause model parameters and possibly training data to be sent "
        "between nodes unencrypted."
    )
    if (session.conf(key) or "false").lower() != "true":
        raise RuntimeError(
            f"{found} To override this configuration and use {api} anyway, you may set '{key}' to "
            f"'true' in the Spark configuration. {consequence}"
        )
    warn(
        f"{found} The Spark configuration '{key}' has been set to 'true' to override this "
        f"configuration and use {api} anyway. {consequence}",
        spelling.logger,
    )
