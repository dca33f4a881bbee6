"""Runs the ranks of each attempt in one barrier stage of Spark."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator
from typing import Any

from distributor.control.polling import Reminder
from distributor.control.run import Attempt, Handle, NodesEnded, Run
from distributor.launchers.spark.capacity.executors import Executors
from distributor.launchers.spark.capacity.slots import Slots
from distributor.launchers.spark.decommissioning import DecommissioningWatch
from distributor.launchers.spark.launcher import Shipped, SparkLauncher, rows_of_tasks
from distributor.launchers.spark.task.result_rows import ROW_SCHEMA, late_output_in, values_in
from distributor.launchers.spark.task_starts import TaskStarts
from distributor.spark.application_end import end_explained
from distributor.spark.error_translation import explain
from distributor.spark.log_quieting import quiet
from distributor.spark.package_shipping import task_frame
from distributor.wire.spark_error_payload import failures_in, timeout_in

TASK = "distributor.launchers.spark.task.task:run"
"""The function that each task runs."""


class BarrierLauncher(SparkLauncher):
    """Runs the ranks of each attempt in a barrier stage, whose tasks Spark starts together."""

    def capacity(self, run: Run, silent: Collection[str]) -> int:
        """Return how many of the run's ranks there are slots for.

        Through Connect nobody knows the slots, and all ranks are launched.
        """
        return self.ranks_with_slots(run, silent)

    @contextlib.contextmanager
    def start(self, attempt: Attempt, deadline: float) -> Iterator[Handle]:
        """Submit the barrier job of an attempt."""
        is_last = not attempt.may_be_followed
        with (
            end_explained(self.session.spark, is_last=is_last),
            self._started(attempt, deadline) as handle,
        ):
            yield handle

    @contextlib.contextmanager
    def _started(self, attempt: Attempt, deadline: float) -> Iterator[Handle]:
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
                quiet(session, run.spec.run_id),
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
