"""The tasks of ordinary jobs that hold slots for a run, as the driver knows them."""

from __future__ import annotations

import functools
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributor.control.run import NodeEnded, NodesEnded
from distributor.control.waiting import Cancellation, Reminder
from distributor.core.text import counted
from distributor.errors import NodeLost, StartTimeout
from distributor.launchers.spark.task.task_data import TaskSpec
from distributor.policies import Gathering
from distributor.screen.messages import notify
from distributor.spark.error_translation import explain
from distributor.spark.spark_job import END_SECONDS, SparkJob
from distributor.wire.hub import Hub
from distributor.wire.messages import Assignment, AssignmentEnded, Dismissal, Lost, MemberUp

POLL_SECONDS = 0.05
REASON_SECONDS = 2.0
"""Seconds in which Spark notices that a task was lost, and why."""
START_SECONDS = 0.5
"""Seconds in which Spark has started the missing tasks of a job that ends, if it can."""
FURTHER_SECONDS = 10.0
"""Seconds without a further task after which a run begins with fewer ranks than it can have, and
that a further task must have been there before an attempt ends for it."""


@dataclass(frozen=True)
class Member:
    """A task that holds a slot, and has a link to the gang's hub.

    Parameters
    ----------
    number : int
        The number of its link.
    job : int
        Which of the gang's jobs it belongs to.
    partition : int
        Which of the job's partitions it computes. Spark may run several tasks for one.
    executor : str
        Its executor, as its host, a colon, and its name there.
    since : float
        When it came, by ``time.monotonic``.
    """

    number: int
    job: int
    partition: int
    executor: str
    since: float

    @property
    def host(self) -> str:
        return self.executor.rpartition(":")[0]

    @property
    def executor_id(self) -> str:
        return self.executor.rpartition(":")[2]


@dataclass(frozen=True)
class _Work:
    """What a member does: it is a node of an attempt, which ends with a call of `post`."""

    serial: int
    node: int
    post: Callable[[object], object]
    member: Member


@dataclass
class _Job:
    """A job of the gang.

    Parameters
    ----------
    job : SparkJob
        The job.
    size : int
        The number of its tasks.
    gone : set of int
        The partitions whose task has ended, and which Spark does not compute again.
    lost : dict of int to (int, float)
        For each partition whose task has lost its link: the task, and when.
    """

    job: SparkJob
    size: int
    gone: set[int] = field(default_factory=set)
    lost: dict[int, tuple[int, float]] = field(default_factory=dict)

    @property
    def expected(self) -> int:
        """How many of its tasks hold a slot, or will."""
        return self.size - len(self.gone)


Submit = Callable[[int, int, Any, Callable[[Any], object]], SparkJob]


class Gang:
    """The tasks of ordinary jobs that hold slots for a run.

    Spark starts a task again if its process was lost. A task that leaves an executor, or loses its
    link, ends normally, because its failure would count for ``spark.task.maxFailures``: a further
    job replaces it. A second task for a partition, such as a speculative one, waits until the first
    has ended.

    Parameters
    ----------
    hub : Hub
        Receives from the tasks.
    submit : callable
        Submits a job of so many tasks for the gang, with a number that identifies it, and a
        function that is called with its end.
    run_id : str
        The run's id.
    """

    def __init__(self, hub: Hub, submit: Submit, run_id: str) -> None:
        self._hub = hub
        self._submit = submit
        self._run_id = run_id
        self._changed = threading.Condition()
        self._members: dict[int, Member] = {}
        self._work: dict[int, _Work] = {}
        self._num_assignments = 0
        self._jobs: dict[int, _Job] = {}
        self._num_jobs = 0
        self._size = 0
        self._ending: BaseException | None = None
        self._thread = threading.Thread(target=self._receive_all, name="gang", daemon=True)

    def __enter__(self) -> Gang:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.dismiss()
        finally:
            self._hub.post(None)  # the last event
            self._thread.join()

    @property
    def members(self) -> list[Member]:
        """The first task of each partition, in the order of jobs and partitions."""
        with self._changed:
            first: dict[tuple[int, int], Member] = {}
            for member in self._members.values():
                first.setdefault((member.job, member.partition), member)
        return [first[place] for place in sorted(first)]

    @property
    def free(self) -> list[Member]:
        """Those of them that have no work."""
        return [member for member in self.members if member.number not in self._work]

    @property
    def nodes(self) -> dict[int, Member]:
        """The members that have work, by the nodes that they are."""
        with self._changed:
            return {work.node: work.member for work in self._work.values()}

    @property
    def num_steady(self) -> int:
        """How many of them came at least `FURTHER_SECONDS` ago."""
        before = time.monotonic() - FURTHER_SECONDS
        return sum(member.since < before for member in self.members)

    # From any thread that runs an attempt

    def gather(
        self,
        least: int,
        most: int,
        deadline: float,
        cancellation: Cancellation,
        *,
        rows: Any = None,
        further_seconds: float = 0.0,
        describe_shortage: Callable[[], str] = str,
    ) -> list[Member]:
        """Wait until tasks hold slots; return them.

        Parameters
        ----------
        least, most : int
            How many are needed, and how many to ask Spark for.
        deadline : float
            When, by ``time.monotonic``, there must be enough.
        cancellation : Cancellation
            Ends the wait.
        rows : DataFrame, optional
            What the tasks compute; by default nothing.
        further_seconds : float
            Seconds without a further task after which fewer than `most` are enough.
        describe_shortage : callable
            Returns why tasks may be missing.

        Raises
        ------
        StartTimeout
            If there are not enough at the deadline.
        """
        reminder, gathering = Reminder(), Gathering(self._run_id, time.monotonic())
        held, came_at = -1, time.monotonic()

        def shortfall() -> str:
            wanted = least if held < least else most
            return f"{_describe(self.members, wanted)} {describe_shortage()}".rstrip()

        while True:
            cancellation.check()
            self.require_jobs(most, rows)
            members, now = self.members, time.monotonic()
            if len(members) > held:
                came_at = now
            held = len(members)
            is_last = held >= most or now >= came_at + further_seconds
            if held >= least and is_last:
                return members
            if now > deadline:
                raise StartTimeout(f"After start_timeout, {shortfall()}")
            gathering.note(held, now)
            reminder.show(shortfall)
            if held < least and gathering.is_futile(now):
                pause = gathering.give_back(now)
                notify(
                    f"Spark has not started {counted(least - held, 'further task')} for some "
                    f"time: the others give their slots back for {pause:.0f} s, because two runs "
                    "may each wait for slots that the other holds."
                )
                self.dismiss()
                cancellation.pause(pause)
                held = -1
            with self._changed:
                self._changed.wait(POLL_SECONDS)

    @property
    def is_new(self) -> bool:
        """Whether its tasks have never had work."""
        return not self._num_assignments

    def assign(
        self,
        nodes: Mapping[int, Member],
        executors: Mapping[int, str],
        spec: TaskSpec,
        post: Callable[[object], object],
    ) -> None:
        """Have members be nodes of an attempt. The end of each is posted as `NodeEnded`.

        Parameters
        ----------
        nodes : mapping of int to Member
            The members by the nodes that they are to be.
        executors : mapping of int to str
            The executors of all nodes.
        spec : TaskSpec
            What they are to do.
        post : callable
            Posts a message to the attempt.
        """
        serial = self._num_assignments = self._num_assignments + 1
        numbers = {member.number: node for node, member in nodes.items()}
        with self._changed:
            for node, member in nodes.items():
                self._work[member.number] = _Work(serial, node, post, member)
            gone = numbers.keys() - self._members.keys()
        self._hub.broadcast(Assignment(serial, pickle.dumps(spec, 5), executors, numbers))
        for number in gone:
            self._end_lost(number)

    def leave(self, executors: Collection[str]) -> None:
        """End the tasks on these executors, which Spark is about to end; others replace them."""
        with self._changed:
            leaving = [each for each in self._members.values() if each.executor_id in executors]
            for member in leaving:
                del self._members[member.number]
                if job := self._jobs.get(member.job):
                    job.gone.add(member.partition)
        for member in leaving:
            self._hub.send(member.number, Dismissal())

    def await_end(self, seconds: float) -> bool:
        """Wait until no member works any more; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._work, seconds)

    def cancel(self) -> None:
        """End the tasks, whatever they do; a next attempt has others."""
        jobs = [each.job for each in self._jobs.values()]
        for job in jobs:
            job.cancel()
            job.end()
        with self._changed:
            self._ending = None  # is no error

    def dismiss(self) -> None:
        """Have all tasks give their slots back."""
        with self._changed:
            jobs, self._jobs = [*self._jobs.values()], {}
            missing = sum(each.expected for each in jobs) - len(self.members)
            # Spark starts the missing tasks in the slots of the others, and they end, too. If it
            # started one of a job that is cancelled just then, its count of tasks that wait would
            # be wrong from then on, and it would ask for too few executors. Tasks on a host that
            # cannot be reached do not end by themselves.
            if missing > len(self._members):
                for each in jobs:
                    each.job.cancel()
            self._members.clear()
        if jobs:
            self._hub.broadcast(Dismissal())
        for each in jobs:
            each.job.end(START_SECONDS if missing else END_SECONDS)

    # On the thread that receives

    def _receive_all(self) -> None:
        while True:
            match self._hub.get(1.0):
                case number, MemberUp() as message:
                    self._add(number, message)
                case number, AssignmentEnded() as message:
                    self._end_work(number, message.serial, error=message.error)
                case number, Lost.LOST:
                    self._lose(number)
                case _, None:
                    return

    def _add(self, number: int, message: MemberUp) -> None:
        with self._changed:
            job = self._jobs.get(message.job)
            is_wanted = job is not None and message.partition not in job.gone
            if job is not None and is_wanted:
                job.lost.pop(message.partition, None)
                self._members[number] = Member(
                    number, message.job, message.partition, message.executor, time.monotonic()
                )
                self._changed.notify_all()
        if not is_wanted:
            self._hub.send(number, Dismissal())

    def _end_work(self, number: int, serial: int | None = None, **ending: Any) -> None:
        """Post the end of a member's work, or of this assignment alone."""
        with self._changed:
            work = self._work.get(number)
            if work is None or serial not in (work.serial, None):
                return
            del self._work[number]
            self._changed.notify_all()
        work.post(NodeEnded(work.node, **ending))

    def _lose(self, number: int) -> None:
        with self._changed:
            member = self._members.pop(number, None)
            if member and (job := self._jobs.get(member.job)):
                job.lost[member.partition] = number, time.monotonic()
            self._changed.notify_all()
        self._end_lost(number)

    def _end_lost(self, number: int) -> None:
        with self._changed:
            work = self._work.get(number)
            job = self._jobs.get(work.member.job) if work else None
        loss = NodeLost("A task of Spark has lost its link to this process.")
        explain_loss = functools.partial(_explain_loss, job.job if job else None, number)
        self._end_work(number, error=loss, explain=explain_loss)

    # The jobs

    def require_jobs(self, size: int, rows: Any = None) -> None:
        """Submit a job for the tasks that are missing; raise what has ended the last one."""
        self._give_up_lost()
        with self._changed:
            self._size = size
            if self._ending is not None:
                error, self._ending = self._ending, None
                raise explain(error, size)
            missing = size - sum(each.expected for each in self._jobs.values())
        if missing <= 0:
            return
        if rows is not None and self._jobs:  # of which each task has its part
            self.dismiss()
            missing = size
        number, self._num_jobs = self._num_jobs, self._num_jobs + 1
        job = self._submit(number, missing, rows, lambda ending: self._note_end(number, ending))
        with self._changed:
            self._jobs[number] = _Job(job, missing)
        job.__enter__()

    def _give_up_lost(self) -> None:
        """Note the lost tasks that Spark does not start again, or not yet: of hosts cut off."""
        before = time.monotonic() - REASON_SECONDS
        with self._changed:
            overdue = [
                (each, partition, number)
                for each in self._jobs.values()
                for partition, (number, since) in each.lost.items()
                if since < before
            ]
        for each, partition, number in overdue:
            has_failed = each.job.failure_of(number)
            with self._changed:
                if each.lost.pop(partition, None) and not has_failed:
                    each.gone.add(partition)

    def _note_end(self, number: int, ending: Any) -> None:
        """Note, on the job's thread, that it has ended."""
        with self._changed:
            if self._jobs.pop(number, None) is None:
                return
            for member in [each for each in self._members.values() if each.job == number]:
                del self._members[member.number]
            self._changed.notify_all()
            if not isinstance(ending, BaseException):  # all of its tasks have left
                return
            working = {task: work for task, work in self._work.items() if work.member.job == number}
            for task in working:
                del self._work[task]
            posts = {work.serial: work.post for work in working.values()}
            self._ending = None if posts else ending
            size = self._size
        for post in posts.values():
            post(NodesEnded(error=ending, explain=lambda error, lost: explain(error, size, lost)))


def _explain_loss(
    job: SparkJob | None, number: int, error: BaseException, first_lost: str
) -> Exception:
    """Return why a task was lost, as soon as Spark says so."""
    deadline = time.monotonic() + REASON_SECONDS
    while job and (text := job.failure_of(number)) is not None and time.monotonic() < deadline:
        if text:
            return explain(RuntimeError(text), 1, first_lost)
        time.sleep(POLL_SECONDS)
    where = f" of {first_lost}" if first_lost else ""
    return NodeLost(
        f"The node{where} ended without reporting a failure, or lost its connection to this "
        "process. The logs of its executor show more."
    )


def _describe(members: Sequence[Member], wanted: int) -> str:
    """Return who is there, and how many are missing."""
    if not members:
        return f"Spark has started none of the {counted(wanted, 'task')} of this run."
    hosts = Counter(member.host for member in members)
    there = ", ".join(f"{number} on {host}" for host, number in sorted(hosts.items()))
    return f"{len(members)} of {counted(wanted, 'task')} hold slots ({there})."
