"""Runs the ranks of all attempts in the tasks of one ordinary job of Spark."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from distributor.control.run import Attempt, Handle, Launcher, Run
from distributor.launchers.spark.capacity.executors import Executors
from distributor.launchers.spark.capacity.slot_shortage import executor_size, why_no_more
from distributor.launchers.spark.capacity.slots import Slots
from distributor.launchers.spark.decommissioning import DecommissioningWatch
from distributor.launchers.spark.gang.gang import FURTHER_SECONDS, Gang, Member
from distributor.launchers.spark.hub_address import choose_hub_address, open_hub
from distributor.launchers.spark.launcher import Shipped, SparkLauncher, rows_of_tasks
from distributor.launchers.spark.task.member import MemberSpec
from distributor.launchers.spark.task.result_rows import ROW_SCHEMA
from distributor.screen.messages import notify
from distributor.spark.application_end import end_explained
from distributor.spark.log_quieting import quiet
from distributor.spark.package_shipping import task_frame
from distributor.spark.spark_job import SparkJob
from distributor.wire.messages import Stop

TASK = "distributor.launchers.spark.task.member:run"
"""The function that each task runs."""
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

            with quiet(self.session, run.spec.run_id), Gang(hub, submit, run.spec.run_id) as gang:
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
    def start(self, attempt: Attempt, deadline: float) -> Iterator[Handle]:
        """Have tasks be the nodes of an attempt."""
        is_last = not attempt.may_be_followed
        with (
            end_explained(self.session.spark, is_last=is_last),
            self._started(attempt, deadline) as handle,
        ):
            yield handle

    @contextlib.contextmanager
    def _started(self, attempt: Attempt, deadline: float) -> Iterator[Handle]:
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
