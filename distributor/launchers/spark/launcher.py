"""Launches runs on Spark's executors: what barrier stages and ordinary jobs have in common."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from distributor.control.polling import Reminder
from distributor.control.run import Attempt, Handle, Launcher, NodesEnded, Run, share_of
from distributor.core.text import counted
from distributor.environments import ship_environment
from distributor.launchers.spark.datasets import Datasets
from distributor.launchers.spark.executors import (
    DecommissioningWatch,
    Executors,
    container_shortage,
)
from distributor.launchers.spark.gang import FURTHER_SECONDS, Gang, Member
from distributor.launchers.spark.hub_address import HubAddress, choose_hub_address, open_hub
from distributor.launchers.spark.large_programs import send_program
from distributor.launchers.spark.slots import Slots, executor_size, why_no_more
from distributor.launchers.spark.task.result_rows import ROW_SCHEMA, late_output_in, values_in
from distributor.launchers.spark.task.task_spec import MemberSpec, ProgramFile, TaskSpec
from distributor.launchers.spark.task_starts import TaskStarts
from distributor.run_spec import RunSpec, Settings, gpu_type_of
from distributor.screen.messages import notify, warn_once
from distributor.serialization.program import Program
from distributor.settings.fields import conf_cache_dir
from distributor.spark.application import end_explained
from distributor.spark.error_translation import explain
from distributor.spark.log_quieting import no_progress_bar
from distributor.spark.package_shipping import task_frame
from distributor.spark.plan import ClusterPlan, check_encryption, check_launch
from distributor.spark.session import Session
from distributor.spark.spark_job import SparkJob
from distributor.spark.user_modules import folders_of_program, hint, ship_modules
from distributor.wire.hub import Hub
from distributor.wire.messages import Stop
from distributor.wire.protocol import rank_secret
from distributor.wire.spark_error_payload import failures_in, timeout_in

TASK = "distributor.launchers.spark.task.task:run"
"""The function that each task runs."""


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

    @contextlib.contextmanager
    def start(self, attempt: Attempt, deadline: float) -> Iterator[Handle]:
        is_last = not attempt.may_be_followed
        with (
            end_explained(self.session.spark, is_last=is_last),
            self.started(attempt, deadline) as handle,
        ):
            yield handle

    def started(
        self, attempt: Attempt, deadline: float
    ) -> contextlib.AbstractContextManager[Handle]:
        """Do what `start` does, with Spark's own errors."""
        raise NotImplementedError

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


class BarrierLauncher(SparkLauncher):
    """Runs the ranks of each attempt in a barrier stage, whose tasks Spark starts together."""

    def capacity(self, run: Run, silent: Collection[str]) -> int:
        """Return how many of the run's ranks there are slots for.

        Through Connect nobody knows the slots, and all ranks are launched.
        """
        return self.ranks_with_slots(run, silent)

    @contextlib.contextmanager
    def started(self, attempt: Attempt, deadline: float) -> Iterator[Handle]:
        """Submit the barrier job of an attempt."""
        session, run, plan = self.session, attempt.run, self.plan_of(attempt)
        rows = rows_of_tasks(session, run.datasets, plan)
        reminder = Reminder()
        with self.hub_opened(attempt) as opened:
            hub = opened.hub
            attempt.announce()  # before the wait for slots
            slots = Slots(session, plan)
            slots.await_all(deadline, run.cancellation, reminder)
            task_spec = self.task_spec(attempt, plan, opened, Shipped.of(session, attempt.spec))
            watch = DecommissioningWatch(Executors(session).leaving, attempt.number)
            frame = task_frame(
                session, rows, TASK, task_spec, ROW_SCHEMA, slots.profile, barrier=True
            )

            def end(ending: list[Any] | BaseException) -> None:
                hub.post(_ended(ending, plan.num_tasks, opened.secret))

            with (
                no_progress_bar(session),
                self.job(run, frame, attempt.num_ranks, end) as job,
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
                        _describe_unlinked,
                        hub.port,
                        has_log_dir=bool(attempt.settings.log_dir),
                    ),
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
        f"{nodes} did not reach this process at port {port}: the ranks' output is in {log} and not "
        "shown here, and values are sent through Spark. Open this port to the executors, or set "
        "hub_address to an address that they can reach."
    )


STOP_SECONDS = 10.0
"""Seconds for nodes to end once they were asked to stop, before their tasks are cancelled."""


class GangLauncher(SparkLauncher):
    """Runs the ranks in tasks that Spark starts one by one, and that wait for each other.

    So executors may come and go, as with dynamic allocation. The tasks that remain after a failure
    run the next attempt too.
    """

    @contextlib.contextmanager
    def opened(self, run: Run) -> Iterator[Launcher]:
        """Open the hub to which the tasks connect."""
        slots = Slots(self.session, self.plan)
        slots.check_limit(self.min_tasks(run))
        if self.session.requested:
            notify(f"Spark starts executors for this run: {executor_size(self.session)} each.")
        settings, secret = run.spec.settings, secrets.token_bytes(32)
        address = choose_hub_address(self.session, settings.hub_address, settings.hub_port)
        with open_hub(address, secret, is_required=True) as hub:
            spec = (address.advertised, hub.port), secret

            def submit(
                number: int, size: int, rows: Any, on_end: Callable[[Any], object]
            ) -> SparkJob:
                frame = task_frame(
                    self.session,
                    rows or self.session.spark.range(0, size, 1, size),
                    TASK,
                    MemberSpec(*spec, number),
                    ROW_SCHEMA,
                    slots.profile,
                    barrier=False,
                )
                return self.job(run, frame, size * self.plan.ranks_per_task, on_end)

            with no_progress_bar(self.session), Gang(hub, submit, run.spec.run_id) as gang:
                yield OpenedGangLauncher(
                    self.session, self.plan, gang, Shipped.of(self.session, run.spec)
                )


@dataclass(frozen=True)
class OpenedGangLauncher(SparkLauncher):
    """Launches the attempts of one run.

    Parameters
    ----------
    gang : Gang
        The tasks.
    shipped : Shipped
        What Spark has copied to their executors.
    """

    gang: Gang
    shipped: Shipped

    def capacity(self, run: Run, silent: Collection[str]) -> int:
        """Return how many of the run's ranks there are tasks for.

        If fewer ranks would do, the first attempt waits a while for more, and further ones take
        what is there. A new job's tasks can only start where there are slots: the first one's
        without dynamic allocation, and those of DataFrames, whose rows Spark moves before.
        """
        knows_slots = not (self.session.allocates_dynamically or self.session.is_connect)
        if run.datasets is not None or (knows_slots and self.gang.is_new):
            return self.ranks_with_slots(run, silent)
        slots = Slots(self.session, self.plan)
        slots.await_stop(silent, run.cancellation)
        least, most = self.min_tasks(run), self.plan.num_tasks
        if least == most:
            return run.spec.num_processes
        most = min(most, slots.limit or most)
        deadline = time.monotonic() + run.spec.settings.start_timeout
        further = FURTHER_SECONDS if self.gang.is_new else 0.0
        with end_explained(self.session.spark):
            members = self._gather(run, least, most, deadline, further)
        return min(most, len(members)) * self.plan.ranks_per_task

    @contextlib.contextmanager
    def started(self, attempt: Attempt, deadline: float) -> Iterator[Handle]:
        """Have tasks be the nodes of an attempt."""
        session, run, plan = self.session, attempt.run, self.plan_of(attempt)
        rows = None if run.datasets is None else rows_of_tasks(session, run.datasets, plan)
        attempt.announce()  # before the wait for slots
        size = plan.num_tasks if rows else self.plan.num_tasks
        members = self._gather(run, plan.num_tasks, size, deadline, rows=rows)[: plan.num_tasks]
        watch = DecommissioningWatch(Executors(session).leaving, attempt.number)
        with self.hub_opened(attempt) as opened:
            spec = self.task_spec(attempt, plan, opened, self.shipped)

            def end_nodes() -> None:
                opened.hub.broadcast(Stop("the run has ended"))
                if not self.gang.await_end(STOP_SECONDS):
                    self.gang.cancel()

            def further_ranks() -> int:
                if rows is not None:  # which Spark has distributed to these tasks
                    return 0
                further = min(self.gang.num_steady, self.plan.num_tasks) - plan.num_tasks
                return max(0, further) * plan.ranks_per_task

            self.gang.assign(members, spec, opened.hub.post)
            try:
                yield Handle(
                    links=opened.hub,
                    num_nodes=plan.num_tasks,
                    ranks_per_node=plan.ranks_per_task,
                    training=self.training(attempt.num_ranks),
                    cancel=end_nodes,
                    leaving=watch.poll,
                    further_ranks=further_ranks,
                )
            finally:
                if not self.gang.await_end(0):
                    end_nodes()
                if rows is not None:  # the next attempt reads others
                    self.gang.dismiss()

    def _gather(
        self,
        run: Run,
        least: int,
        most: int,
        deadline: float,
        further_seconds: float = 0.0,
        rows: Any = None,
    ) -> list[Member]:
        self.gang.leave(Executors(self.session).leaving(None))
        return self.gang.gather(
            least,
            most,
            deadline,
            run.cancellation,
            rows=rows,
            further_seconds=further_seconds,
            describe_shortage=lambda: why_no_more(self.session),
        )
