"""Waits until the executors have slots for a run's tasks, and until Spark has started them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from distributor.control.run import NodeStarts
from distributor.control.waiting import Cancellation, Reminder, poll_until
from distributor.core.text import counted
from distributor.core.versions import listed
from distributor.errors import DistributorError, StartTimeout
from distributor.launchers.spark.executors import MAX_EXECUTORS, Executors, ended_executors
from distributor.spark.application import check_not_ended
from distributor.spark.error_translation import more_slots
from distributor.spark.plan import ClusterPlan
from distributor.spark.session import EXECUTOR_GPUS, MEMORY, Session
from distributor.wire.protocol import DRIVER_LEASE_SECONDS


def executor_size(session: Session) -> str:
    """Return what each executor asks for, by the session's configuration and Spark's defaults."""
    cores, gpus = session.executor_cores, int(float(session.conf(EXECUTOR_GPUS) or 0))
    size = "all cores of a worker" if cores is None else counted(int(cores), "core")
    memory = session.conf(MEMORY) or "1g"
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


REMOVAL_SECONDS = 240.0
"""Seconds within which Spark notices, by its defaults, that an executor no longer answers."""
STOPPED_SECONDS = DRIVER_LEASE_SECONDS + 10.0
"""Seconds in which a node that does not reach the driver has stopped its ranks."""
FEWER_SECONDS = 10.0
"""Seconds to wait for slots for all ranks if fewer would do.

Executors register in this time, also those that replace dead ones.
"""


@dataclass(frozen=True)
class Slots:
    """The executors' slots for the tasks of a plan.

    Parameters
    ----------
    session : Session
        The session.
    plan : ClusterPlan
        What the run needs.
    """

    session: Session
    plan: ClusterPlan

    @property
    def profile(self) -> Any:
        """The resource profile of the tasks; None for the application's default profile."""
        return self.session.profile(self.plan.profile_gpus)

    @property
    def limit(self) -> int | None:
        """How many of the tasks the application can ever run at once by its configuration.

        None if that depends on the cluster.
        """
        return Executors(self.session).max_slots(self.plan.profile_gpus)

    def check_limit(self, wanted: int) -> None:
        """Check that the application can run so many tasks at once."""
        most = self.limit
        if most is not None and most < wanted:
            limit = self.limit_text(wanted, most)
            raise DistributorError(f"{limit} {more_slots(self.session.master)}")

    def limit_text(self, wanted: int, most: int) -> str:
        """Return that the configuration allows fewer slots than are wanted."""
        found, tasks = "", "barrier tasks" if self.plan.barrier else "tasks"
        if self.session.allocates_dynamically:
            found = f" '{MAX_EXECUTORS}' is {self.session.conf(MAX_EXECUTORS) or 'unset'}."
        return (
            f"{wanted} {tasks} are wanted at once, and the executors of {self.session.master} "
            f"never have room for more than {most}.{found}"
        )

    def await_all(self, deadline: float, cancellation: Cancellation, reminder: Reminder) -> None:
        """Wait for slots for all tasks: a job that is submitted without them sleeps for 15 s."""
        wanted = self.plan.num_tasks
        if self._too_few(wanted) is None:
            return
        self.check_limit(wanted)
        with ended_executors(self.session) as describe_ended:

            def shortage(slots: int) -> str:
                return why_few_slots(self.session, self.plan, slots, describe_ended())

            slots = poll_until(
                lambda: self._too_few(wanted), deadline, cancellation, shortage, reminder
            )
            if slots is not None:
                raise StartTimeout(shortage(slots))

    def await_at_most(self, most: int, cancellation: Cancellation) -> int:
        """Wait, for some seconds, for slots for so many tasks; return for how many there are."""
        limit = self.limit
        wanted = most if limit is None else min(most, limit)
        deadline = time.monotonic() + FEWER_SECONDS
        slots = poll_until(lambda: self._too_few(wanted), deadline, cancellation)
        return wanted if slots is None else slots

    def await_removal(self, hosts: Collection[str], cancellation: Cancellation) -> None:
        """Wait until Spark starts no task on hosts that no longer answer, and none runs there."""
        self.await_stop(hosts, cancellation)
        poll_until(
            lambda: Executors(self.session).hosts() & set(hosts) or None,
            time.monotonic() + REMOVAL_SECONDS,
            cancellation,
            lambda left: f"Spark still counts on executors on {', '.join(sorted(left))}.",
        )

    def await_stop(self, hosts: Collection[str], cancellation: Cancellation) -> None:
        """Wait until the ranks on hosts that no longer answer have stopped by themselves.

        Until then they may reach storage.
        """
        if not hosts:
            return
        poll_until(
            lambda: hosts,
            time.monotonic() + STOPPED_SECONDS,
            cancellation,
            lambda left: f"Ranks may still run on {', '.join(sorted(left))}.",
        )

    def why_not_started(self, other_tasks: int) -> str:
        """Return what may keep Spark from starting the tasks of a submitted barrier job."""
        if other_tasks:
            return (
                f"Other jobs of this application run {counted(other_tasks, 'task')}: wait for them "
                "to end, or add executors or cores to the application."
            )
        slots = Executors(self.session).slots(self.profile)
        if slots is not None and slots >= self.plan.num_tasks:
            return "The executors have room for them: Spark may still be preparing the job."
        return (
            "A barrier job's tasks start together, once there is a free slot for each: too few may "
            f"exist, or others may hold them. {more_slots(self.session.master)}"
        )

    def _too_few(self, wanted: int) -> int | None:
        """Return how many slots there are if these are fewer than wanted."""
        check_not_ended(self.session.spark)
        slots = Executors(self.session).slots(self.profile)
        return slots if slots is not None and slots < wanted else None


POLL_SECONDS = 1.0
"""Seconds between two questions to Spark."""
SILENT_SECONDS = 15.0
"""Seconds from the start of all tasks until a message says that nothing was received from them."""


@dataclass(eq=False)
class TaskStarts(NodeStarts):
    """Whether Spark has started a barrier job's tasks, which it starts together, and what they do.

    A node that has failed to connect to the driver waits for the others in a barrier of Spark. A
    node whose Python has not started yet does not.

    Parameters
    ----------
    count : int
        How many tasks the job has.
    has_begun : callable
        Returns whether Spark has started any of them, or None if this Spark does not report it.
        (How many have started is not asked, because Spark's count may be ten seconds old.)
    obstacle : callable
        Returns what may keep Spark from starting them, in sentences for the user.
    reminder : Reminder, optional
        The reminder of the wait that this is a part of; by default a new one.
    barrier_arrivals : callable
        Returns how many tasks wait in a barrier, and how many barriers all of them have passed, or
        None if this Spark does not report it.
    """

    count: int
    has_begun: Callable[[], bool | None] = lambda: None
    obstacle: Callable[[], str] = lambda: ""
    reminder: Reminder = field(default_factory=Reminder)
    barrier_arrivals: Callable[[], tuple[int, int] | None] = lambda: None

    def __post_init__(self) -> None:
        self.begun, self.began_at, self.arrivals = None, math.inf, None
        self._poll_at = time.monotonic() + POLL_SECONDS

    def poll(self) -> None:
        now = time.monotonic()
        if now < self._poll_at:
            return
        self._poll_at = now + POLL_SECONDS
        if not self.have_started:
            self.was_polled, self.begun = True, self.has_begun()
            if self.begun:
                self.began_at = now
        self.arrivals = self.barrier_arrivals()

    def show_shortfall(self) -> None:
        """Show, at the intervals of the reminder, that nothing was received from the tasks."""
        if self.are_pending or self.are_unknown or self.all_started_for(SILENT_SECONDS):
            self.reminder.show(self.shortfall)

    def shortfall(self) -> str:
        """Return a sentence that nothing was received from the tasks, and why that may be."""
        tasks = f"the {self.count} tasks" if self.count > 1 else "the one task"
        if self.begun is None:
            return (
                f"nothing was received from {tasks} of this run, and this Spark does not report "
                "whether it has started them."
            )
        if self.begun:
            return (
                f"nothing was received from {tasks} of this run, which Spark has started: Python "
                "is still starting there, or has no link to this process and prepares the "
                "environment or the data."
            )
        return f"Spark has started none of {tasks} of this run. {self.obstacle()}".rstrip()
