"""The tasks of one ordinary job that hold slots for a run, as the driver knows them."""

from __future__ import annotations

import functools
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from distributor.control.cancellation import Cancellation
from distributor.control.polling import Reminder
from distributor.control.run import NodeEnded, NodesEnded
from distributor.core.text import counted
from distributor.errors import NodeLost, StartTimeout
from distributor.launchers.spark.task.task_spec import TaskSpec
from distributor.node.agent.worker_env import node_order
from distributor.policies.gathering import Gathering
from distributor.screen.messages import notify
from distributor.spark.error_translation import explain
from distributor.spark.spark_job import SparkJob
from distributor.wire.hub import LOST, Hub
from distributor.wire.messages import Assignment, AssignmentEnded, Dismissal, MemberUp

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
    partition : int
        Which of the job's partitions it computes. Spark may run several tasks for one.
    executor : str
        Its executor, as its host, a colon, and its name there.
    since : float
        When it came, by ``time.monotonic``.
    """

    number: int
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


class Gang:
    """The tasks of one ordinary job that hold slots for a run.

    Spark starts a task again if it was lost. A second task for a partition, such as a speculative
    one, waits until the first has ended.

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

    def __init__(
        self,
        hub: Hub,
        submit: Callable[[int, int, Any, Callable[[Any], object]], SparkJob],
        run_id: str,
    ) -> None:
        self._hub = hub
        self._submit = submit
        self._run_id = run_id
        self._changed = threading.Condition()
        self._members: dict[int, Member] = {}
        self._work: dict[int, _Work] = {}
        self._num_assignments = 0
        self._job: SparkJob | None = None
        self._job_number = -1
        self._size = 0
        self._ending: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._receive_all, name="gang", daemon=True)

    def __enter__(self) -> Gang:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.dismiss()
        finally:
            self._closed = True
            self._hub.post(None)  # ends the wait
            self._thread.join()

    @property
    def members(self) -> list[Member]:
        """The first task of each partition, in the order of the partitions."""
        with self._changed:
            first: dict[int, Member] = {}
            for member in self._members.values():
                first.setdefault(member.partition, member)
        return [first[partition] for partition in sorted(first)]

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
            self._require_job(most, rows)
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
        self, members: Sequence[Member], spec: TaskSpec, post: Callable[[object], object]
    ) -> None:
        """Have members be the nodes of an attempt. The end of each is posted as `NodeEnded`."""
        serial = self._num_assignments = self._num_assignments + 1
        executors = tuple(member.executor for member in members)
        places = {member.number: place for place, member in enumerate(members)}
        order = node_order([member.host for member in members])
        with self._changed:
            for place, member in enumerate(members):
                self._work[member.number] = _Work(serial, order.index(place), post)
            gone = [member.number for member in members if member.number not in self._members]
        self._hub.broadcast(Assignment(serial, pickle.dumps(spec, 5), executors, places))
        for number in gone:
            self._end_lost(number)

    def leave(self, executors: Collection[str]) -> None:
        """Have Spark start the tasks on these executors, which it is about to end, elsewhere."""
        with self._changed:
            leaving = [each for each in self._members.values() if each.executor_id in executors]
            for member in leaving:
                del self._members[member.number]
        for member in leaving:
            self._hub.send(member.number, Dismissal(again=True))

    def await_end(self, seconds: float) -> bool:
        """Wait until no member works any more; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._work, seconds)

    def cancel(self) -> None:
        """End the tasks, whatever they do; a next attempt has others."""
        job = self._job
        if job is not None:
            job.cancel()
            job.end()
            with self._changed:
                self._ending = None  # is no error

    def dismiss(self) -> None:
        """Have all tasks give their slots back."""
        with self._changed:
            job, self._job = self._job, None
            missing = self._size - len({member.partition for member in self._members.values()})
            # Spark starts the missing tasks in the slots of the others, and they end, too. If it
            # started one of a job that is cancelled just then, its count of tasks that wait would
            # be wrong from then on, and it would ask for too few executors. Tasks on a host that
            # cannot be reached do not end by themselves.
            if missing > len(self._members) and job is not None:
                job.cancel()
            self._members.clear()
        if job is None:
            return
        self._hub.broadcast(Dismissal())
        if missing:
            job.end(START_SECONDS)
        else:
            job.end()

    # On the thread that receives

    def _receive_all(self) -> None:
        while not self._closed:
            event = self._hub.get(1.0)
            if event is None:
                continue
            number, message = event
            if isinstance(message, MemberUp):
                self._add(number, message)
            elif isinstance(message, AssignmentEnded):
                ended = functools.partial(NodeEnded, error=message.error)
                self._end_work(number, ended, message.serial)
            elif message is LOST:
                self._lose(number)

    def _add(self, number: int, message: MemberUp) -> None:
        with self._changed:
            is_current = message.job == self._job_number and self._job is not None
            if is_current:
                self._members[number] = Member(
                    number, message.partition, message.executor, time.monotonic()
                )
                self._changed.notify_all()
        if not is_current:
            self._hub.send(number, Dismissal())

    def _end_work(
        self, number: int, ended: Callable[[int], NodeEnded], serial: int | None = None
    ) -> None:
        with self._changed:
            work = self._work.get(number)
            if work is None or serial not in (work.serial, None):
                return
            del self._work[number]
            self._changed.notify_all()
        work.post(ended(work.node))

    def _lose(self, number: int) -> None:
        with self._changed:
            self._members.pop(number, None)
            self._changed.notify_all()
        self._end_lost(number)

    def _end_lost(self, number: int) -> None:
        loss = NodeLost("A task of Spark has lost its link to this process.")
        explain_loss = functools.partial(_explain_loss, self._job, number)
        self._end_work(number, lambda node: NodeEnded(node, loss, explain_loss))

    # The job

    def _require_job(self, size: int, rows: Any) -> None:
        """Submit a job, unless there is one; raise what has ended the last one."""
        with self._changed:
            if self._ending is not None:
                error, self._ending = self._ending, None
                raise explain(error, self._size)
            if self._job is not None:
                return
            self._job_number += 1
            self._size = size
            number = self._job_number
        job = self._submit(number, size, rows, lambda ending: self._note_end(number, ending))
        with self._changed:
            self._job = job
        job.__enter__()

    def _note_end(self, number: int, ending: Any) -> None:
        """Note, on the job's thread, that it has ended."""
        error = ending if isinstance(ending, BaseException) else None
        error = error or RuntimeError("The tasks of this run have ended by themselves.")
        with self._changed:
            if number != self._job_number or self._job is None:
                return
            posts = {work.serial: work.post for work in self._work.values()}
            self._job, self._ending = None, None if posts else error
            self._work.clear()
            self._members.clear()
            self._changed.notify_all()
        explain_end = functools.partial(_explain_end, self._size)
        for post in posts.values():
            post(NodesEnded(error=error, explain=explain_end))


def _explain_end(size: int, error: BaseException, first_lost: str) -> Exception:
    return explain(error, size, first_lost)


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
