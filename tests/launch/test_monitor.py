"""The driver's view of a run where only some nodes have a link to it, over real links."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import pytest
from support.waiting import until

from distributor import TorchDistributor
from distributor.errors import DistributorError, ExecutorNotReady, RunTimeout, StartTimeout
from distributor.launch.job import Job
from distributor.launch.programs import program_of
from distributor.launch.spark import polling
from distributor.launch.spark.monitor import rendezvous, task_starts
from distributor.launch.spark.monitor.run_monitor import RunMonitor
from distributor.launch.spark.monitor.task_starts import TaskStarts
from distributor.launch.spark.plan import ClusterPlan
from distributor.node.agent.failure_grace import LATE_START_SECONDS
from distributor.node.agent.output.sink import Sink
from distributor.serialization.outcome import Failure, Origin, Outcome
from distributor.wire.hub import Hub
from distributor.wire.link import Link
from distributor.wire.messages import (
    Failed,
    NodeUp,
    Preparing,
    RanksStarted,
    Rendezvous,
    RendezvousThroughSpark,
    StackRequest,
    Stacks,
    Stop,
    Stream,
)
from distributor.wire.spark_error_payload import TaskFailed

SECRET = b"a secret of the run"
SOON = 10.0
SHORT = 0.2
NODES = 3


class Silent:
    """A sink for ranks that print nothing."""

    def write(self, rank: int, stream: Stream, data: bytes) -> None:
        raise AssertionError(f"rank {rank} printed {data!r}")

    def has_room(self) -> bool:
        return True


class FakeNode:
    """A node's side of a run, driven by a test."""

    def __init__(
        self,
        hub: Hub,
        number: int,
        versions: Mapping[str, str] | None = None,
        *,
        prepares: bool = False,
    ) -> None:
        self.heard: queue.Queue[object] = queue.Queue()
        self._link = Link.connect(
            "127.0.0.1", hub.port, SECRET, number, timeout=SOON, on_message=self.heard.put
        )
        self._up = NodeUp(f"host{number}", versions or {})
        self.tell(Preparing(self._up.host) if prepares else self._up)

    def come_up(self) -> None:
        self.tell(self._up)

    def tell(self, message: object) -> None:
        self._link.send(message)

    def hears(self) -> object:
        return self.heard.get(timeout=SOON)

    def close(self) -> None:
        self._link.close()


class Followed:
    """A run of three nodes that a thread follows to its end."""

    def __init__(self, hub: Hub, monitor: RunMonitor, tasks: TaskStarts | None = None) -> None:
        self.hub = hub
        self.cancelled = False
        self._monitor = monitor
        self._tasks = tasks
        self._outcomes: list[Outcome] = []
        self._raised: list[Exception] = []
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        try:
            self._outcomes = self._monitor.follow(self._cancel, self._tasks)
        except DistributorError as error:
            self._raised.append(error)

    def _cancel(self) -> None:
        self.cancelled = True

    def raised(self) -> Exception:
        self._thread.join(SOON)
        return self._raised[0]

    def end_by(self, error: Exception) -> None:
        self._monitor.job_ended(error)

    def end(self) -> list[Outcome]:
        self._monitor.job_ended([])
        self._thread.join(SOON)
        assert not self._thread.is_alive()
        return self._outcomes


class Start(Protocol):
    """Starts to follow a run, with what Spark says of its tasks."""

    def __call__(
        self,
        *,
        tasks: TaskStarts | None = None,
        seconds: float,
        settings: Mapping[str, Any] | None = None,
    ) -> Followed: ...


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(rendezvous, "NODE_UP_SECONDS", SHORT)
    monkeypatch.setattr(rendezvous, "LINK_SECONDS", SHORT)
    monkeypatch.setattr(task_starts, "POLL_SECONDS", 0.0)
    plan = ClusterPlan(num_tasks=NODES, ranks_per_task=1, use_gpu=False)
    sink: Sink = Silent()
    with contextlib.ExitStack() as stack:

        def started(
            *,
            tasks: TaskStarts | None = None,
            seconds: float,
            settings: Mapping[str, Any] | None = None,
        ) -> Followed:
            given = TorchDistributor(NODES, use_gpu=False, **(settings or {}))
            program = program_of(print, (), {})
            job = Job(program=program, num_processes=NODES, min_processes=NODES, settings=given)
            hub = stack.enter_context(Hub("127.0.0.1", SECRET))
            deadline = time.monotonic() + seconds
            monitor = stack.enter_context(RunMonitor(job, plan, hub, sink, deadline))
            return Followed(hub, monitor, tasks)

        yield started


@pytest.fixture
def run(start: Start) -> Followed:
    return start(seconds=60)


def failure_of(rank: int) -> Failure:
    origin = Origin(rank=rank, local_rank=0, host=f"host{rank}")
    return Failure(origin=origin, summary="KeyError: 'x'", text="", pickled=None)


def test_a_failure_ends_the_run_without_waiting_for_nodes_that_cannot_tell(
    run: Followed, warned: Callable[[], list[str]]
) -> None:
    node = FakeNode(run.hub, 0)
    node.tell(Rendezvous("127.0.0.1", 1))
    assert node.hears() == RendezvousThroughSpark()
    node.tell(RanksStarted())
    failed = time.monotonic()
    node.tell(Failed(failure_of(0)))
    assert isinstance(node.hears(), Stop)
    assert time.monotonic() - failed < LATE_START_SECONDS
    node.close()
    assert run.end() == [failure_of(0)]
    (warning,) = warned()
    assert "Nodes 1, 2 did not reach this process" in warning


def test_a_node_that_is_late_learns_how_the_others_meet(
    run: Followed, warned: Callable[[], list[str]]
) -> None:
    first, second = FakeNode(run.hub, 0), FakeNode(run.hub, 1)
    assert first.hears() == second.hears() == RendezvousThroughSpark()
    late = FakeNode(run.hub, 2)
    assert late.hears() == RendezvousThroughSpark()
    for node in (first, second, late):
        node.tell(RanksStarted())
        node.close()
    assert run.end() == []
    assert warned() == [], "all of them have a link"


def test_nodes_that_prepare_their_environment_are_waited_for(
    run: Followed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(polling, "TELL_SECONDS", SHORT)
    slow = [FakeNode(run.hub, number, prepares=True) for number in (1, 2)]
    first = FakeNode(run.hub, 0)
    first.tell(Rendezvous("127.0.0.1", 1))
    with pytest.raises(queue.Empty):
        first.heard.get(timeout=3 * SHORT)
    assert "Waiting: the environment is not ready on host1, host2." in capsys.readouterr().err
    for node in slow:
        node.come_up()
    assert [node.hears() for node in (first, *slow)] == [Rendezvous("127.0.0.1", 1)] * NODES
    for node in (first, *slow):
        node.close()
    assert run.end() == []


def test_nodes_that_differ_are_told_before_they_meet(run: Followed) -> None:
    versions = [{"torch": "2.12.0"}, {"torch": "2.13.0"}, {"torch": "2.13.0"}]
    nodes = [FakeNode(run.hub, number, versions[number]) for number in range(NODES)]
    nodes[0].tell(Rendezvous("127.0.0.1", 1))

    heard = nodes[1].hears()

    assert isinstance(heard, Stop), "and no rendezvous"
    for node in nodes:
        node.close()
    error = run.raised()
    assert isinstance(error, ExecutorNotReady)
    assert "2.12.0 on host0 (node 0); 2.13.0 on host1 (node 1), host2 (node 2)" in str(error)


def seen(begun: bool) -> TaskStarts:
    """Spark's word that it has started the tasks, or not."""
    return TaskStarts(NODES, lambda: begun, lambda: "All slots are taken.")


def test_tasks_that_spark_does_not_start_are_waited_for_until_the_deadline(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(polling, "TELL_SECONDS", SHORT)
    run = start(tasks=seen(False), seconds=3 * SHORT)

    error = run.raised()

    assert isinstance(error, StartTimeout)
    assert str(error) == (
        "After start_timeout, Spark has started none of the 3 tasks of this run. "
        "All slots are taken."
    )
    assert run.cancelled
    told = capsys.readouterr().err
    assert "Waiting: Spark has started none of the 3 tasks of this run. All slots are" in told
    assert "Started" not in told


def test_tasks_that_run_without_a_link_are_warned_of_at_once(
    start: Start, warned: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(tasks=seen(True), seconds=60)
    until(lambda: bool(warned()), "the driver warns", SOON)
    until(lambda: "Started distributed" in capsys.readouterr().err, "it says so", SOON)
    assert run.end() == []
    (warning,) = warned()
    assert "Nodes 0, 1, 2 did not reach this process" in warning


def test_where_spark_does_not_tell_a_run_without_a_link_goes_on(
    start: Start, warned: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(tasks=TaskStarts(NODES), seconds=SHORT)
    until(lambda: bool(warned()), "the driver warns", SOON)
    assert "Started" not in capsys.readouterr().err, "nobody has said so"
    assert run.end() == []
    assert not run.cancelled


def test_a_run_has_started_when_its_ranks_have(
    run: Followed, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [FakeNode(run.hub, number) for number in range(NODES)]
    nodes[0].tell(Rendezvous("127.0.0.1", 1))
    for node in nodes:
        assert node.hears() == Rendezvous("127.0.0.1", 1)
    nodes[0].tell(RanksStarted())
    nodes[1].tell(RanksStarted())
    assert "Started" not in capsys.readouterr().err
    nodes[2].tell(RanksStarted())
    until(lambda: "Started distributed" in capsys.readouterr().err, "it says so", SOON)
    for node in nodes:
        node.close()
    assert run.end() == []


def test_at_the_deadline_nodes_with_and_without_a_link_say_where_their_ranks_stand(
    start: Start,
) -> None:
    run = start(settings={"timeout": SHORT}, seconds=60)
    node = FakeNode(run.hub, 0)
    assert node.hears() == RendezvousThroughSpark()
    node.tell(RanksStarted())
    assert node.hears() == StackRequest()
    node.tell(Stacks({0: "in step"}))
    others = RunTimeout("The run was stopped at its timeout.", stacks={1: "in wait"})
    run.end_by(RuntimeError(f"Job aborted: {TaskFailed.timed_out(others, SECRET)}"))
    node.close()

    error = run.raised()

    assert isinstance(error, RunTimeout)
    assert error.stacks == {0: "in step", 1: "in wait"}
    assert f"timeout of {SHORT:g} s" in str(error)
