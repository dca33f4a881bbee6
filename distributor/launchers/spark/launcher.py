"""Launches runs on Spark's executors, in barrier stages or in the tasks of ordinary jobs."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from distributor.control.run import (
    Attempt,
    Handle,
    Launcher,
    NodesEnded,
    NodesLeaving,
    Run,
    share_of,
)
from distributor.control.waiting import Reminder
from distributor.core.text import counted
from distributor.launchers.spark.datasets import Datasets
from distributor.launchers.spark.executors import (
    DecommissioningWatch,
    Executors,
    container_shortage,
)
from distributor.launchers.spark.gang import FURTHER_SECONDS, Gang, Member
from distributor.launchers.spark.hub_address import NodeHub, choose_hub_address, open_hub
from distributor.launchers.spark.slots import Slots, TaskStarts, executor_size, why_no_more
from distributor.launchers.spark.task.task_data import (
    ROW_SCHEMA,
    MemberSpec,
    Shipped,
    TaskSpec,
    late_output_in,
    values_in,
)
from distributor.node.agent.worker_env import node_order
from distributor.programs import ship_environment
from distributor.run_spec import RunSpec, Settings, gpu_type_of
from distributor.screen.messages import notify, warn_once
from distributor.settings import conf_cache_dir
from distributor.spark.application import end_explained, no_progress_bar
from distributor.spark.error_translation import explain
from distributor.spark.plan import ClusterPlan, check_encryption, check_launch
from distributor.spark.session import Session
from distributor.spark.shipping import portable_task, send_program
from distributor.spark.spark_job import SparkJob
from distributor.spark.user_modules import folders_of_program, hint, ship_modules
from distributor.wire.messages import Stop
from distributor.wire.protocol import rank_secret
from distributor.wire.spark_error_payload import failures_in, timeout_in

TASK = "distributor.launchers.spark.task.task:run"
"""The function that each task runs."""


@dataclass(frozen=True)
class SparkLauncher(Launcher):
    """Runs the ranks of each attempt in tasks of Spark. Subclasses have `placed`.

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
        return {
            "mode": "cluster",
            "nodes": self.plan.num_tasks,
            "gpus": self.plan.num_ranks if self.plan.use_gpu else 0,
            "application_id": self.session.conf("spark.app.id"),
        }

    def opened(self, run: Run) -> AbstractContextManager[Launcher]:
        self.check_room(run.spec.min_processes)
        return super().opened(run)

    @property
    def ranks_per_task(self) -> int:
        return self.plan.ranks_per_task

    @property
    def grows(self) -> bool:
        return self.session.allocates_dynamically

    def check_room(self, num_ranks: int) -> None:
        Slots(self.session, self.plan).check_limit(self.tasks_for(num_ranks))

    def room(self) -> int | None:
        if self.plan.driver_gpus:  # of which each run takes the first ones
            return self.plan.num_ranks
        tasks = Executors(self.session).slots(Slots(self.session, self.plan).profile)
        return None if tasks is None else tasks * self.plan.ranks_per_task

    def capacity(self, run: Run, silent: Collection[str]) -> int:
        """Return how many of the run's ranks there are slots for.

        If fewer ranks would do, executors have some seconds to register. Hosts that no longer
        answer do not count. Through Connect nobody knows the slots, and all ranks are launched.
        """
        slots = Slots(self.session, self.plan)
        least, most = self.tasks_for(run.spec.min_processes), self.plan.num_tasks
        with end_explained(self.session.spark):
            slots.await_removal(silent, run.cancellation)
            if least < most:
                most = max(least, slots.await_at_most(most, run.cancellation))
        return most * self.plan.ranks_per_task

    def thread(self, target: Callable[[], object]) -> threading.Thread:
        return self.session.thread(target)

    @contextlib.contextmanager
    def start(self, attempt: Attempt, deadline: float) -> Iterator[Handle]:
        plan, datasets = self.plan.with_ranks(attempt.num_ranks), attempt.run.datasets
        with end_explained(self.session.spark, is_last=not attempt.may_be_followed):
            rows = None
            if isinstance(datasets, Datasets):
                rows = datasets.frame(plan.num_tasks, plan.ranks_per_task)
            hub = self.new_hub(attempt.settings)
            with hub:
                attempt.announce()  # before the wait for slots
                with self.placed(attempt, plan, rows, hub, deadline) as handle:
                    yield handle

    def placed(
        self, attempt: Attempt, plan: ClusterPlan, rows: Any, hub: NodeHub, deadline: float
    ) -> AbstractContextManager[Handle]:
        """Have tasks of Spark be the nodes of an attempt.

        Parameters
        ----------
        attempt : Attempt
            The attempt.
        plan : ClusterPlan
            Its tasks.
        rows : DataFrame or None
            The datasets' rows, with a partition for each task.
        hub : NodeHub
            The driver's end of the nodes' links.
        deadline : float
            When, by ``time.monotonic``, its ranks must have started.
        """
        raise NotImplementedError

    # What subclasses share

    def tasks_for(self, num_ranks: int) -> int:
        """Return how many tasks so many ranks need."""
        return -(-num_ranks // self.plan.ranks_per_task)

    def new_hub(self, settings: Settings, *, is_required: bool = False) -> NodeHub:
        address = choose_hub_address(self.session, settings.hub_address, settings.hub_port)
        return open_hub(address, secrets.token_bytes(32), is_required=is_required)

    def shipped(self, spec: RunSpec) -> Shipped:
        """Send what a run needs; tasks that are submitted after this have it."""
        program, settings = spec.program, spec.settings
        return Shipped(
            send_program(self.session, program),
            ship_modules(
                self.session, folders_of_program(program), program.imports, settings.py_modules
            ),
            ship_environment(self.session, settings.environment),
        )

    def task_spec(
        self, attempt: Attempt, plan: ClusterPlan, hub: NodeHub, shipped: Shipped
    ) -> TaskSpec:
        """Return what the tasks of an attempt are to do. Warn if the executors are too small."""
        session, settings, datasets = self.session, attempt.settings, attempt.run.datasets
        tasks, ranks = plan.num_tasks, plan.ranks_per_task
        if shortage := container_shortage(session.conf, tasks, ranks, warm=settings.warm):
            warn_once(shortage)
        parts = tasks if attempt.spec.keep_all else 1
        return TaskSpec(
            share=share_of(attempt, tasks, rank_secret(hub.secret)),
            shipped=shipped,
            use_gpu=plan.use_gpu,
            driver_gpus=plan.driver_gpus,
            gpu_type=gpu_type_of(settings),
            hub=hub.address,
            secret=hub.secret,
            log_dir=None if settings.log_dir is None else os.fspath(settings.log_dir),
            max_spark_result_bytes=Executors(session).max_result_bytes() // parts,
            datasets=datasets.specs if isinstance(datasets, Datasets) else (),
            cache_dir=conf_cache_dir(session),
            check_memory=not shortage,
        )

    def job(
        self,
        run: Run,
        spec: TaskSpec | MemberSpec,
        size: int,
        rows: Any,
        on_end: Callable[[Any], object],
    ) -> SparkJob:
        """Return a job of so many tasks, which is not submitted yet."""
        task = portable_task(self.session, TASK, pickle.dumps(spec, protocol=5))
        if rows is None:
            rows = self.session.spark.range(0, size, 1, size)
        profile = self.session.profile(self.plan.profile_gpus)
        options = {} if profile is None else {"profile": profile}
        barrier = isinstance(spec, TaskSpec)
        program, ranks = run.spec.program.name, counted(size * self.plan.ranks_per_task, "rank")
        return SparkJob(
            self.session,
            self.session.map_in_arrow(rows, task, ROW_SCHEMA, barrier=barrier, **options),
            run.spec.run_id,
            on_end,
            description=f"{program} on {ranks}",
            call_site=run.call_site,
            pool=run.spec.settings.pool,
        )


class BarrierLauncher(SparkLauncher):
    """Runs the ranks of each attempt in a barrier stage, whose tasks Spark starts together."""

    @contextlib.contextmanager
    def placed(
        self, attempt: Attempt, plan: ClusterPlan, rows: Any, hub: NodeHub, deadline: float
    ) -> Iterator[Handle]:
        """Submit the barrier job of an attempt."""
        run, slots, reminder = attempt.run, Slots(self.session, plan), Reminder()
        slots.await_all(deadline, run.cancellation, reminder)
        spec = self.task_spec(attempt, plan, hub, self.shipped(attempt.spec))
        watch = DecommissioningWatch(Executors(self.session), attempt.number)

        def end(ending: list[Any] | BaseException) -> None:
            hub.post(_ended(ending, plan.num_tasks, hub.secret))

        log = "log_dir there" if attempt.settings.log_dir else "the logs of the executors"
        with (
            no_progress_bar(self.session),
            self.job(run, spec, plan.num_tasks, rows, end) as job,
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
                cancel=job.cancel,
                starts=tasks,
                leaving=watch.poll,
                describe_unlinked=lambda nodes: (
                    f"{nodes} did not reach this process at port {hub.port}: the ranks' output is "
                    f"in {log} and not shown here, and values are sent through Spark. Open this "
                    "port to the executors, or set hub_address to an address that they can reach."
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


STOP_SECONDS, STOP_INTERVAL = 10.0, 0.5
"""Seconds for nodes to end once they were asked to stop, before their tasks are cancelled, and
between two requests: one may connect late."""


class GangLauncher(SparkLauncher):
    """Runs the ranks in tasks that Spark starts one by one, and that wait for each other.

    So executors may come and go, as with dynamic allocation. The tasks that remain after a failure
    run the next attempt too.
    """

    @contextlib.contextmanager
    def opened(self, run: Run) -> Iterator[Launcher]:
        """Open the hub to which the tasks connect."""
        self.check_room(run.spec.min_processes)
        if self.session.requested:
            notify(f"Spark starts executors for this run: {executor_size(self.session)} each.")
        hub = self.new_hub(run.spec.settings, is_required=True)

        def submit(number: int, size: int, rows: Any, on_end: Callable[[Any], object]) -> SparkJob:
            return self.job(run, MemberSpec(hub.address, hub.secret, number), size, rows, on_end)

        with hub, no_progress_bar(self.session), Gang(hub, submit, run.spec.run_id) as gang:
            yield OpenedGangLauncher(self.session, self.plan, gang, self.shipped(run.spec))


@dataclass(frozen=True)
class OpenedGangLauncher(SparkLauncher):
    """Launches the attempts of one run.

    Parameters
    ----------
    gang : Gang
        The tasks.
    copied : Shipped
        What Spark has copied to their executors.
    """

    gang: Gang
    copied: Shipped

    def capacity(self, run: Run, silent: Collection[str]) -> int:
        """Return how many of the run's ranks there are tasks for.

        If fewer ranks would do, the first attempt waits a while for more, and further ones take
        what is there. A new job's tasks can only start where there are slots: the first one's
        without dynamic allocation, and those of DataFrames, whose rows Spark moves before.
        """
        knows_slots = not (self.session.allocates_dynamically or self.session.is_connect)
        if run.datasets is not None or (knows_slots and self.gang.is_new):
            return super().capacity(run, silent)
        slots = Slots(self.session, self.plan)
        slots.await_stop(silent, run.cancellation)
        least, most = self.tasks_for(run.spec.min_processes), self.plan.num_tasks
        if least == most:
            return run.spec.num_processes
        most = min(most, slots.limit or most)
        deadline = time.monotonic() + run.spec.settings.start_timeout
        further = FURTHER_SECONDS if self.gang.is_new else 0.0
        with end_explained(self.session.spark):
            members = self._gather(run, least, most, deadline, further_seconds=further)
        return min(most, len(members)) * self.plan.ranks_per_task

    @contextlib.contextmanager
    def placed(
        self, attempt: Attempt, plan: ClusterPlan, rows: Any, hub: NodeHub, deadline: float
    ) -> Iterator[Handle]:
        """Have tasks of the gang be the nodes of an attempt."""
        gang = self.gang
        size = self.plan.num_tasks if rows is None else plan.num_tasks
        members = self._gather(attempt.run, plan.num_tasks, size, deadline, rows=rows)
        watch = DecommissioningWatch(Executors(self.session), attempt.number)
        spec = self.task_spec(attempt, plan, hub, self.copied)

        def end_nodes() -> None:
            due = time.monotonic() + STOP_SECONDS
            while time.monotonic() < due:
                hub.broadcast(Stop("the run has ended"))
                if gang.await_end(STOP_INTERVAL):
                    return
            gang.cancel()

        def leaving(hosts: Collection[str]) -> NodesLeaving | None:
            found = watch.poll(hosts)
            if found is None:
                return None
            nodes = [n for n, member in gang.nodes.items() if member.executor_id in found.executors]
            return replace(found, nodes=frozenset(nodes))

        def further_ranks() -> int:
            if rows is not None:  # which Spark has distributed to these tasks
                return 0
            further = min(gang.num_steady, self.plan.num_tasks) - plan.num_tasks
            return max(0, further) * plan.ranks_per_task

        order = node_order([member.host for member in members[: plan.num_tasks]])
        self._assign({node: members[place] for node, place in enumerate(order)}, spec, hub.post)
        goes_on = attempt.settings.recovery == "in_place" and rows is None
        num_nodes = self.plan.num_tasks
        joining = replace(spec, share=replace(spec.share, num_nodes=num_nodes, joins=True))
        try:
            yield Handle(
                links=hub,
                num_nodes=plan.num_tasks,
                cancel=end_nodes,
                leaving=leaving,
                further_ranks=further_ranks,
                max_nodes=num_nodes if goes_on else 0,
                replace=lambda nodes: self._fill(nodes, joining, hub.post) if goes_on else (),
            )
        finally:
            if not gang.await_end(0):
                end_nodes()
            if rows is not None:  # the next attempt reads others
                gang.dismiss()

    def _fill(
        self, nodes: Collection[int], spec: TaskSpec, post: Callable[[object], object]
    ) -> Collection[int]:
        """Have tasks without work be some of these nodes; ask Spark for those that are missing."""
        self.gang.require_jobs(self.plan.num_tasks)
        if self.gang.free:
            self.gang.leave(Executors(self.session).leaving(None))
        found = dict(zip(nodes, self.gang.free, strict=False))
        if found:
            self._assign(found, spec, post)
        return found

    def _assign(
        self, nodes: Mapping[int, Member], spec: TaskSpec, post: Callable[[object], object]
    ) -> None:
        known = {**self.gang.nodes, **nodes}
        executors = {node: known[node].executor for node in sorted(known)}
        self.gang.assign(nodes, executors, spec, post)

    def _gather(
        self, run: Run, least: int, most: int, deadline: float, **options: Any
    ) -> list[Member]:
        """Have the gang gather tasks on executors that Spark is not about to end."""
        self.gang.leave(Executors(self.session).leaving(None))
        options["describe_shortage"] = lambda: why_no_more(self.session)
        return self.gang.gather(least, most, deadline, run.cancellation, **options)
