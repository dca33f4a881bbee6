"""Launches runs on Spark's executors: what barrier stages and ordinary jobs have in common."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from distributor.control.run import Attempt, Launcher, Run, share_of
from distributor.core.text import counted
from distributor.launchers.spark.capacity.container_memory import container_shortage
from distributor.launchers.spark.capacity.executors import Executors
from distributor.launchers.spark.capacity.slots import Slots
from distributor.launchers.spark.datasets.collection import Datasets
from distributor.launchers.spark.hub_address import HubAddress, choose_hub_address, open_hub
from distributor.launchers.spark.large_programs import send_program
from distributor.launchers.spark.task.task_spec import ProgramFile, TaskSpec
from distributor.programs.environments import ship_environment
from distributor.run.settings import Settings, gpu_type_of
from distributor.run.spec import RunSpec
from distributor.screen.one_time_warnings import warn_once
from distributor.serialization.program import Program
from distributor.settings.defaults import conf_cache_dir
from distributor.spark.application_end import end_explained
from distributor.spark.plan import ClusterPlan, check_encryption, check_launch
from distributor.spark.session import Session
from distributor.spark.spark_job import SparkJob
from distributor.spark.user_modules import folders_of_program, hint, ship_modules
from distributor.wire.hub import Hub
from distributor.wire.sealing import rank_secret


class Shipped(NamedTuple):
    """What Spark copies to each executor that runs a task: files, by their names there.

    A small program is none of them.
    """

    program: Program | ProgramFile
    modules: str | None
    environment: str | tuple[str, ...] | None

    @classmethod
    def of(cls, session: Session, spec: RunSpec) -> Shipped:
        """Send what a run needs; tasks that are submitted after this have it."""
        settings = spec.settings
        return cls(
            send_program(session, spec.program),
            ship_modules(
                session,
                folders_of_program(spec.program),
                spec.program.imports,
                settings.py_modules,
            ),
            ship_environment(session, settings.environment),
        )


class Opened(NamedTuple):
    """What an attempt needs of the driver.

    Parameters
    ----------
    hub : Hub
        The driver's end of the nodes' links.
    address : HubAddress
        Where it listens.
    secret : bytes
        The attempt's secret.
    """

    hub: Hub
    address: HubAddress
    secret: bytes


@dataclass(frozen=True)
class SparkLauncher(Launcher):
    """Runs the ranks of each attempt in tasks of Spark.

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
        processes = counted(num_ranks, "executor process", "executor processes")
        return f"distributed training with {processes}"

    def check(self, settings: Settings) -> None:
        check_encryption(self.session, settings.spelling)
        check_launch(self.session, self.plan)

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

    def opened(self, run: Run) -> contextlib.AbstractContextManager[Launcher]:
        Slots(self.session, self.plan).check_limit(self.min_tasks(run))
        return super().opened(run)

    def thread(self, target: Callable[[], object]) -> threading.Thread:
        return self.session.thread(target)

    # What subclasses share

    def min_tasks(self, run: Run) -> int:
        """Return how many tasks the run needs at least."""
        return -(-run.spec.min_processes // self.plan.ranks_per_task)

    def ranks_with_slots(self, run: Run, silent: Collection[str]) -> int:
        """Return how many of the run's ranks there are slots for.

        If fewer ranks would do, executors have some seconds to register. Hosts that no longer
        answer do not count.
        """
        slots = Slots(self.session, self.plan)
        least, most = self.min_tasks(run), self.plan.num_tasks
        with end_explained(self.session.spark):
            slots.await_removal(silent, run.cancellation)
            if least < most:
                most = max(least, slots.await_at_most(most, run.cancellation))
        return most * self.plan.ranks_per_task

    def plan_of(self, attempt: Attempt) -> ClusterPlan:
        return self.plan.with_tasks(attempt.num_ranks // self.plan.ranks_per_task)

    @contextlib.contextmanager
    def hub_opened(self, attempt: Attempt) -> Iterator[Opened]:
        """Open the hub of an attempt."""
        settings, secret = attempt.settings, secrets.token_bytes(32)
        address = choose_hub_address(self.session, settings.hub_address, settings.hub_port)
        with open_hub(address, secret) as hub:
            yield Opened(hub, address, secret)

    def task_spec(
        self, attempt: Attempt, plan: ClusterPlan, opened: Opened, shipped: Shipped
    ) -> TaskSpec:
        """Return what the tasks of an attempt are to do. Warn if the executors are too small."""
        session, datasets = self.session, attempt.run.datasets
        spec, settings = attempt.spec, attempt.settings
        shortage = container_shortage(
            session.conf, plan.num_tasks, plan.ranks_per_task, warm=settings.warm
        )
        if shortage:
            warn_once(shortage)
        secret = opened.secret
        return TaskSpec(
            share=share_of(attempt, plan.num_tasks, plan.ranks_per_task, rank_secret(secret)),
            program=shipped.program,
            use_gpu=plan.use_gpu,
            driver_gpus=plan.driver_gpus,
            gpu_type=gpu_type_of(settings),
            hub=(opened.address.advertised, opened.hub.port),
            secret=secret,
            log_dir=None if settings.log_dir is None else os.fspath(settings.log_dir),
            max_spark_result_bytes=Executors(session).max_result_bytes()
            // (plan.num_tasks if spec.keep_all else 1),
            datasets=datasets.specs if isinstance(datasets, Datasets) else (),
            modules=shipped.modules,
            environment=shipped.environment,
            cache_dir=conf_cache_dir(session),
            check_memory=not shortage,
        )

    def job(
        self,
        run: Run,
        frame: Any,
        num_ranks: int,
        on_end: Callable[[Any], object],
    ) -> SparkJob:
        """Return the job of these tasks, which is not submitted yet."""
        spec = run.spec
        return SparkJob(
            self.session,
            frame,
            spec.run_id,
            on_end,
            description=f"{spec.program.name} on {counted(num_ranks, 'rank')}",
            call_site=run.call_site,
            pool=spec.settings.pool,
        )


def rows_of_tasks(session: Session, datasets: Any, plan: ClusterPlan) -> Any:
    """Return a DataFrame with a partition for each task: the datasets' rows, or a number."""
    if isinstance(datasets, Datasets):
        return datasets.frame(plan.num_tasks, plan.ranks_per_task)
    return session.spark.range(0, plan.num_tasks, 1, plan.num_tasks)
