"""Launches a run on Spark's executors, with one barrier task for each node."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from distributor.core.addresses import port_range
from distributor.core.text import counted
from distributor.launch.defaults import conf_cache_dir
from distributor.launch.hangs.stalls import activity_interval
from distributor.launch.job import Job
from distributor.launch.one_time_warnings import warn_once
from distributor.launch.output.messages import notify
from distributor.launch.settings import Settings, gpu_type_of
from distributor.launch.spark.application_end import end_explained
from distributor.launch.spark.capacity.container_memory import container_shortage
from distributor.launch.spark.capacity.executors import Executors
from distributor.launch.spark.capacity.slots import Slots
from distributor.launch.spark.environments import ship_environment
from distributor.launch.spark.hub_address import choose_hub_address, open_hub
from distributor.launch.spark.large_programs import program_for_nodes, use_spark
from distributor.launch.spark.log_quieting import quiet
from distributor.launch.spark.monitor.run_monitor import RunMonitor
from distributor.launch.spark.monitor.task_starts import TaskStarts
from distributor.launch.spark.package_shipping import barrier_frame
from distributor.launch.spark.plan import ClusterPlan, check_encryption, check_launch
from distributor.launch.spark.polling import Reminder
from distributor.launch.spark.session import Session
from distributor.launch.spark.spark_job import SparkJob
from distributor.launch.spark.user_modules import hint, ship_modules
from distributor.node.agent.output.sink import Sink
from distributor.node.spark_task.program_file import ProgramNotReceived
from distributor.node.spark_task.result_rows import ROW_SCHEMA
from distributor.node.spark_task.task_spec import ProgramFile, TaskSpec
from distributor.serialization.outcome import Outcome
from distributor.serialization.program import Program


@dataclass(frozen=True)
class SparkLauncher:
    """Runs a job's ranks in one barrier job of Spark.

    Parameters
    ----------
    session : Session
        The Spark session.
    plan : ClusterPlan
        How many tasks there are, and what each of them has.
    """

    session: Session
    plan: ClusterPlan

    @property
    def shares_disk(self) -> bool:
        """Whether the ranks certainly reach files that are on this machine."""
        return self.session.is_one_machine

    def training(self, num_processes: int) -> str:
        """Return how messages name a run of this size, as PySpark's class names it."""
        return self.plan.training(num_processes)

    def check(self, settings: Settings) -> None:
        """Check the cluster's configuration for what keeps a run from starting."""
        check_encryption(self.session, settings.spelling)
        check_launch(self.session, self.plan)

    def prepare(self, settings: Settings, num_processes: int) -> None:
        """Do nothing: executors may not be there yet, and the first run starts their zygotes."""

    def resolve_size(self, job: Job) -> tuple[SparkLauncher, int]:
        """Return the launcher of as many of the job's ranks as there are slots for, and how many.

        If fewer ranks would do, executors have some seconds to register. Through Connect nobody
        knows the slots, and all ranks are launched.
        """
        slots = Slots(self.session, self.plan)
        per_task = self.plan.ranks_per_task
        min_tasks, tasks = -(-job.min_processes // per_task), self.plan.num_tasks
        with end_explained(self.session.spark):
            slots.await_removal(job.silent, job.cancellation)
            if min_tasks < tasks:
                tasks = max(min_tasks, min(tasks, slots.await_at_most(tasks, job.cancellation)))
        return replace(self, plan=self.plan.with_tasks(tasks)), tasks * per_task

    def launch(self, job: Job, sink: Sink) -> list[Outcome]:
        """Run all ranks; return the outcomes of those that ended by themselves.

        Raises
        ------
        OSError
            If ``hub_address`` or ``hub_port`` cannot be bound.
        StartTimeout, RunTimeout, RunStalled
            If a deadline has passed, or all ranks have been idle for too long.
        ExecutorNotReady
            If an executor lacks what a rank needs.
        NodeLost
            If a node no longer answers, or Spark lost its executor.
        ApplicationEnded
            If the application has ended.
        RunCancelled
            If the run was cancelled.
        DistributorError
            If the executors can never have enough slots, or Spark ended the job and no rank
            reported a cause.
        """
        with end_explained(self.session.spark, is_last=not job.may_be_followed):
            try:
                return self._launch(job, sink, heading=job.heading)
            except ProgramNotReceived as error:
                notify(f"{error} Spark sends them to the executors of this session from now on.")
                use_spark(self.session)
                return self._launch(job, sink)

    def hint(self, error: Exception, job: Job) -> str | None:
        """Return why a rank lacks a module or file that this process has, if that is the error."""
        return hint(error, job.program, job.settings.py_modules)

    def describe(self) -> dict[str, object]:
        """Return where ranks are launched, for the record of the run."""
        ranks = self.plan.num_tasks * self.plan.ranks_per_task
        return {
            "mode": "cluster",
            "nodes": self.plan.num_tasks,
            "gpus": ranks if self.plan.use_gpu else 0,
            "application_id": self.session.conf("spark.app.id"),
        }

    def thread(self, target: Callable[[], object]) -> threading.Thread:
        """Return a thread that can launch a run on behalf of the calling thread."""
        return self.session.thread(target)

    def _launch(self, job: Job, sink: Sink, heading: str = "") -> list[Outcome]:
        rows = self._rows_of_tasks(job)
        deadline = time.monotonic() + job.settings.start_timeout
        reminder = Reminder()
        secret = secrets.token_bytes(32)
        address = choose_hub_address(self.session, job.settings.hub_address, job.settings.hub_port)
        with (
            open_hub(address, secret) as hub,
            program_for_nodes(self.session, job.program, hub, address.bound) as program,
        ):
            if heading:
                notify(heading)
            slots = Slots(self.session, self.plan)
            slots.await_all(deadline, job.cancellation, reminder)
            shortage = self._warn_of_memory(job.settings.warm)
            spec = self._spec(
                job, program, (address.advertised, hub.port), secret, check_memory=not shortage
            )
            frame = barrier_frame(self.session, rows, TASK, spec, ROW_SCHEMA, slots.profile)
            with (
                quiet(self.session),
                RunMonitor(
                    job, self.plan, hub, sink, deadline, Executors(self.session).leaving
                ) as monitor,
                SparkJob(
                    self.session,
                    frame,
                    job.run_id,
                    monitor.job_ended,
                    description=f"{job.program.name} on {counted(job.num_processes, 'rank')}",
                    call_site=job.call_site,
                    pool=job.settings.pool,
                ) as barrier_job,
            ):
                tasks = TaskStarts(
                    self.plan.num_tasks,
                    barrier_job.has_begun,
                    lambda: slots.why_not_started(barrier_job.other_running_tasks()),
                    reminder,
                    barrier_job.barrier_arrivals,
                )
                return monitor.follow(barrier_job.cancel, tasks)

    def _rows_of_tasks(self, job: Job) -> Any:
        """Return a DataFrame with a partition for each task: the datasets' rows, or a number."""
        tasks = self.plan.num_tasks
        if job.datasets:
            return job.datasets.frame(tasks, self.plan.ranks_per_task)
        return self.session.spark.range(0, tasks, 1, tasks)

    def _warn_of_memory(self, warm: bool) -> bool:
        """Warn if executors are too small by Spark's configuration; return whether they are."""
        conf, plan = self.session.conf, self.plan
        shortage = container_shortage(conf, plan.num_tasks, plan.ranks_per_task, warm=warm)
        if shortage:
            warn_once(shortage)
        return shortage is not None

    def _spec(
        self,
        job: Job,
        program: Program | ProgramFile,
        hub: tuple[str, int],
        secret: bytes,
        *,
        check_memory: bool,
    ) -> TaskSpec:
        log_dir, tasks = job.settings.log_dir, self.plan.num_tasks
        return TaskSpec(
            run_id=job.run_id,
            attempt=job.attempt,
            program=program,
            program_name=job.program.name,
            ranks_per_node=self.plan.ranks_per_task,
            keep_all=job.keep_all,
            env=dict(job.env),
            use_gpu=self.plan.use_gpu,
            driver_gpus=self.plan.driver_gpus,
            hub=hub,
            secret=secret,
            log_dir=None if log_dir is None else os.fspath(log_dir),
            max_spark_result_bytes=Executors(self.session).max_result_bytes()
            // (tasks if job.keep_all else 1),
            rendezvous_timeout=job.settings.start_timeout,
            timeout=job.settings.timeout,
            activity_interval=activity_interval(job.settings),
            warm=job.settings.warm,
            preload=tuple(job.settings.preload),
            datasets=job.datasets.specs if job.datasets else (),
            gpu_type=gpu_type_of(job.settings),
            modules=ship_modules(self.session, job.program, job.settings.py_modules),
            environment=ship_environment(self.session, job.settings.environment),
            rank_ports=port_range("rank_ports", job.settings.rank_ports),
            cache_dir=conf_cache_dir(self.session),
            check_memory=check_memory,
        )


TASK = "distributor.node.spark_task.task:run"
"""The function that each task runs."""
