"""Launches a run on Spark's executors, with one barrier task for each node."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from distributor.control.polling import Reminder
from distributor.control.run import (
    Attempt,
    Handle,
    Launcher,
    NodesEnded,
    Relaunch,
    Run,
    share_of,
)
from distributor.core.text import counted
from distributor.launchers.spark.capacity.container_memory import container_shortage
from distributor.launchers.spark.capacity.executors import Executors
from distributor.launchers.spark.capacity.slots import Slots
from distributor.launchers.spark.datasets.collection import Datasets
from distributor.launchers.spark.decommissioning import DecommissioningWatch
from distributor.launchers.spark.hub_address import choose_hub_address, open_hub
from distributor.launchers.spark.large_programs import program_for_nodes, use_spark, uses_spark
from distributor.launchers.spark.task.result_rows import ROW_SCHEMA, late_output_in, values_in
from distributor.launchers.spark.task.task_spec import ProgramFile, TaskSpec
from distributor.launchers.spark.task_starts import TaskStarts
from distributor.programs.environments import ship_environment
from distributor.programs.user_modules import hint, ship_modules
from distributor.run.settings import Settings, gpu_type_of
from distributor.run.spec import RunSpec
from distributor.screen.one_time_warnings import warn_once
from distributor.serialization.program import Program
from distributor.settings.defaults import conf_cache_dir
from distributor.spark.application_end import end_explained
from distributor.spark.error_translation import explain
from distributor.spark.log_quieting import quiet
from distributor.spark.package_shipping import barrier_frame
from distributor.spark.plan import ClusterPlan, check_encryption, check_launch
from distributor.spark.session import Session
from distributor.spark.spark_job import SparkJob
from distributor.wire.sealing import rank_secret
from distributor.wire.spark_error_payload import failures_in, timeout_in
from distributor.wire.transfer import ProgramNotReceived

TASK = "distributor.launchers.spark.task.task:run"
"""The function that each task runs."""


@dataclass(frozen=True)
class SparkLauncher(Launcher):
    """Runs the ranks of each attempt in one barrier job of Spark.

    Parameters
    ----------
    session : Session
        The Spark session.
    plan : ClusterPlan
        How many tasks there are at most, and what each of them has.
    """

    session: Session
    plan: ClusterPlan

    @property
    def shares_disk(self) -> bool:  # type: ignore[override]
        return self.session.is_one_machine

    def training(self, num_ranks: int) -> str:
        return f"distributed training with {num_ranks} executor processes"

    def check(self, settings: Settings) -> None:
        check_encryption(self.session, settings.spelling)
        check_launch(self.session, self.plan)

    def capacity(self, run: Run, silent: Collection[str]) -> int:
        """Return how many of the run's ranks there are slots for.

        If fewer ranks would do, executors have some seconds to register. Through Connect nobody
        knows the slots, and all ranks are launched.
        """
        slots = Slots(self.session, self.plan)
        per_task = self.plan.ranks_per_task
        min_tasks, tasks = -(-run.spec.min_processes // per_task), self.plan.num_tasks
        with end_explained(self.session.spark):
            slots.await_removal(silent, run.cancellation)
            if min_tasks < tasks:
                tasks = max(min_tasks, min(tasks, slots.await_at_most(tasks, run.cancellation)))
        return tasks * per_task

    @contextlib.contextmanager
    def start(self, attempt: Attempt, deadline: float) -> Iterator[Handle]:
        """Submit the barrier job of an attempt."""
        through_spark = uses_spark(self.session)
        with end_explained(self.session.spark, is_last=not attempt.may_be_followed):
            try:
                with self._started(attempt, deadline) as handle:
                    yield handle
            except ProgramNotReceived as error:
                use_spark(self.session)
                if through_spark:
                    raise
                raise Relaunch(
                    f"{error} Spark sends them to the executors of this session from now on."
                ) from None

    @contextlib.contextmanager
    def _started(self, attempt: Attempt, deadline: float) -> Iterator[Handle]:
        session, spec, settings, run = self.session, attempt.spec, attempt.settings, attempt.run
        plan = self.plan.with_tasks(attempt.num_ranks // self.plan.ranks_per_task)
        rows = _rows_of_tasks(session, run.datasets, plan)
        reminder = Reminder()
        secret = secrets.token_bytes(32)
        address = choose_hub_address(session, settings.hub_address, settings.hub_port)
        with (
            open_hub(address, secret) as hub,
            program_for_nodes(session, spec.program, hub, address.bound) as program,
        ):
            attempt.announce()  # before the wait for slots
            slots = Slots(session, plan)
            slots.await_all(deadline, run.cancellation, reminder)
            shortage = _warn_of_memory(session, plan, settings.warm)
            task_spec = _task_spec(
                attempt,
                session,
                plan,
                program,
                (address.advertised, hub.port),
                secret,
                check_memory=not shortage,
            )
            watch = DecommissioningWatch(Executors(session).leaving, attempt.number)
            frame = barrier_frame(session, rows, TASK, task_spec, ROW_SCHEMA, slots.profile)
            with (
                quiet(session),
                SparkJob(
                    session,
                    frame,
                    spec.run_id,
                    lambda ending: hub.post(_ended(ending, plan.num_tasks, secret)),
                    description=f"{spec.program.name} on {counted(attempt.num_ranks, 'rank')}",
                    call_site=run.call_site,
                    pool=settings.pool,
                ) as job,
            ):
                tasks = TaskStarts(
                    plan.num_tasks,
                    job.has_begun,
                    lambda: slots.why_not_started(job.other_running_tasks()),
                    reminder,
                    job.barrier_arrivals,
                )
                yield Handle(
                    links=hub,
                    num_nodes=plan.num_tasks,
                    ranks_per_node=plan.ranks_per_task,
                    training=self.training(attempt.num_ranks),
                    cancel=job.cancel,
                    starts=tasks,
                    leaving=watch.poll,
                    describe_unlinked=functools.partial(
                        _describe_unlinked, hub.port, has_log_dir=bool(settings.log_dir)
                    ),
                )

    def hint(self, error: Exception, spec: RunSpec) -> str | None:
        return hint(error, spec.program, spec.settings.py_modules)

    def describe(self) -> dict[str, object]:
        ranks = self.plan.num_tasks * self.plan.ranks_per_task
        return {
            "mode": "cluster",
            "nodes": self.plan.num_tasks,
            "gpus": ranks if self.plan.use_gpu else 0,
            "application_id": self.session.conf("spark.app.id"),
        }

    def thread(self, target: Callable[[], object]) -> threading.Thread:
        return self.session.thread(target)


def _rows_of_tasks(session: Session, datasets: Any, plan: ClusterPlan) -> Any:
    """Return a DataFrame with a partition for each task: the datasets' rows, or a number."""
    if isinstance(datasets, Datasets):
        return datasets.frame(plan.num_tasks, plan.ranks_per_task)
    return session.spark.range(0, plan.num_tasks, 1, plan.num_tasks)


def _warn_of_memory(session: Session, plan: ClusterPlan, warm: bool) -> bool:
    """Warn if executors are too small by Spark's configuration; return whether they are."""
    shortage = container_shortage(session.conf, plan.num_tasks, plan.ranks_per_task, warm=warm)
    if shortage:
        warn_once(shortage)
    return shortage is not None


def _task_spec(
    attempt: Attempt,
    session: Session,
    plan: ClusterPlan,
    program: Program | ProgramFile,
    hub: tuple[str, int],
    secret: bytes,
    *,
    check_memory: bool,
) -> TaskSpec:
    spec, settings, datasets = attempt.spec, attempt.settings, attempt.run.datasets
    return TaskSpec(
        share=share_of(attempt, plan.num_tasks, plan.ranks_per_task, rank_secret(secret)),
        program=program,
        use_gpu=plan.use_gpu,
        driver_gpus=plan.driver_gpus,
        gpu_type=gpu_type_of(settings),
        hub=hub,
        secret=secret,
        log_dir=None if settings.log_dir is None else os.fspath(settings.log_dir),
        max_spark_result_bytes=Executors(session).max_result_bytes()
        // (plan.num_tasks if spec.keep_all else 1),
        datasets=datasets.specs if isinstance(datasets, Datasets) else (),
        modules=ship_modules(session, spec.program, settings.py_modules),
        environment=ship_environment(session, settings.environment),
        cache_dir=conf_cache_dir(session),
        check_memory=check_memory,
    )


def _ended(ending: list[Any] | BaseException, num_tasks: int, secret: bytes) -> NodesEnded:
    """Translate the end of the Spark job: its rows, or the error that ended it."""
    if not isinstance(ending, BaseException):
        # Read by the driver's thread, which raises the error if there is no room for them.
        return NodesEnded(values=lambda: values_in(ending), output=late_output_in(ending))
    text = str(ending)
    return NodesEnded(
        error=ending,
        failures=failures_in(text, secret),
        timed_out=timeout_in(text, secret),
        explain=lambda error, first_lost: explain(error, num_tasks, first_lost),
    )


def _describe_unlinked(port: int, nodes: str, *, has_log_dir: bool) -> str:
    log = "log_dir there" if has_log_dir else "the logs of the executors"
    return (
        f"{nodes} did not reach this process at port {port}: their output is in {log} and not "
        "shown here, and values are sent through Spark. Open this port to the executors, or set "
        "hub_address to an address that they can reach."
    )
