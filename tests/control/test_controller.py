"""The controller, with nodes that a test drives over real links: states, deadlines, outcomes."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from support.waiting import until

from distributor import TorchDistributor
from distributor.control import controller, waiting
from distributor.control import nodes as rendezvous
from distributor.control.controller import Controller
from distributor.control.run import Attempt, Handle, Launcher, NodesEnded, NodeStarts, Resized, Run
from distributor.control.sink import DriverSink, Listeners
from distributor.errors import (
    DistributorError,
    ExecutorNotReady,
    RunStalled,
    RunTimeout,
    StartTimeout,
)
from distributor.launchers.spark import slots as task_starts
from distributor.launchers.spark.slots import TaskStarts
from distributor.node.node import Node
from distributor.node.process.specs import NodeShare
from distributor.policies import UNLINKED_SECONDS, Deadlines
from distributor.programs import program_of
from distributor.run_spec import RunSpec, Settings
from distributor.serialization.outcome import Outcome
from distributor.settings import rank_settings
from distributor.wire.hub import Hub
from distributor.wire.messages import (
    Heartbeat,
    Idle,
    NodeDone,
    NodeUp,
    Preempted,
    Preparing,
    RanksStarted,
    Release,
    Rendezvous,
    StackRequest,
    Stacks,
    Stop,
    Unlink,
)
from distributor.wire.tcp_link import Link

SECRET = b"a secret of the run"
SOON = 10.0
SHORT = 0.2
NODES = 3


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
        self.received: queue.Queue[object] = queue.Queue()
        self._link = Link(
            "127.0.0.1", hub.port, SECRET, number, timeout=SOON, on_message=self._receive
        )
        self._up = NodeUp(f"host{number}", versions or {})
        self.send(Preparing(self._up.host) if prepares else self._up)

    def _receive(self, message: object) -> None:
        if not isinstance(message, Heartbeat):
            self.received.put(message)

    def come_up(self) -> None:
        self.send(self._up)

    def send(self, message: object) -> None:
        self._link.send(message)

    def receive(self) -> object:
        return self.received.get(timeout=SOON)

    def close(self) -> None:
        self._link.close()


class FollowedRun:
    """A run of three nodes that a controller follows on a thread; a context manager that ends it.

    Attributes
    ----------
    ahead : float
        Seconds by which the controller's clock is ahead of this machine's.
    further_ranks : int
        How many ranks more the launcher has room for.
    """

    def __init__(self, hub: Hub, attempt: Attempt, seconds: float, tasks: NodeStarts) -> None:
        self.hub = hub
        self.cancelled = False
        self.ahead = 0.0
        self.further_ranks = 0
        self._attempt = attempt
        self._deadline = time.monotonic() + seconds
        self._handle = Handle(
            links=hub,
            num_nodes=NODES,
            cancel=self._cancel,
            starts=tasks,
            further_ranks=lambda: self.further_ranks,
        )
        self._outcomes: list[Outcome] = []
        self._raised: list[Exception] = []
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def __enter__(self) -> FollowedRun:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._thread.is_alive():  # the test failed
            self.hub.post(NodesEnded())
            self._thread.join(SOON)

    def _follow(self) -> None:
        with DriverSink(self._attempt, Listeners((), Launcher().thread)) as sink:
            followed = Controller(
                self._attempt,
                self._handle,
                sink,
                self._deadline,
                lambda: time.monotonic() + self.ahead,
            )
            try:
                self._outcomes = followed.follow()
            except DistributorError as error:
                self._raised.append(error)

    def _cancel(self) -> None:
        self.cancelled = True

    def report_checkpoint(self) -> None:
        self._attempt.progress.checkpoints += 1

    def error(self) -> Exception:
        self._thread.join(SOON)
        assert self._raised, "no error yet" if self._thread.is_alive() else "it ended without one"
        return self._raised[0]

    def end(self) -> list[Outcome]:
        self.hub.post(NodesEnded())
        self._thread.join(SOON)
        assert not self._thread.is_alive()
        return self._outcomes


Start = Callable[..., FollowedRun]
"""Starts a controller; takes seconds, and optionally tasks (the launcher's report) and settings."""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(rendezvous, "LINK_SECONDS", SHORT)
    monkeypatch.setattr(task_starts, "POLL_SECONDS", 0.0)
    with contextlib.ExitStack() as stack:

        def started(
            *,
            tasks: NodeStarts | None = None,
            seconds: float,
            settings: Mapping[str, Any] | None = None,
        ) -> FollowedRun:
            spec = RunSpec(
                program=program_of(print, (), {}),
                num_processes=NODES,
                min_processes=NODES,
                settings=TorchDistributor(NODES, use_gpu=False, **(settings or {})),
            )
            attempt = Attempt(run=Run(spec=spec, launcher=Launcher()), num_ranks=NODES)
            hub = stack.enter_context(Hub("127.0.0.1", SECRET))
            tasks = tasks or TaskStarts(NODES)
            return stack.enter_context(FollowedRun(hub, attempt, seconds, tasks))

        yield started


@pytest.fixture
def run(start: Start) -> FollowedRun:
    return start(seconds=60)


def nodes_with_rendezvous(run: FollowedRun) -> list[FakeNode]:
    """Let all nodes come up, and receive the address of rank 0's store."""
    # Once a node is up, the controller waits only SHORT for others, unless they are preparing.
    nodes = [FakeNode(run.hub, number, prepares=True) for number in range(NODES)]
    nodes[0].send(Rendezvous("127.0.0.1", 1))
    for node in nodes:
        node.come_up()
    for node in nodes:
        assert node.receive() == Rendezvous("127.0.0.1", 1)
    return nodes


def started_nodes(run: FollowedRun) -> list[FakeNode]:
    """The same, and let their ranks start."""
    nodes = nodes_with_rendezvous(run)
    for node in nodes:
        node.send(RanksStarted())
    return nodes


def test_all_nodes_go_on_without_links_if_one_has_none_in_time(
    run: FollowedRun, warned: Callable[[], list[str]]
) -> None:
    """Without facts, as through Connect, a late node is taken for one without a link."""
    nodes = [FakeNode(run.hub, number) for number in range(NODES - 1)]
    nodes[0].send(Rendezvous("127.0.0.1", 1))
    for node in nodes:
        assert node.receive() == Unlink()
        node.close()
    late = FakeNode(run.hub, NODES - 1)
    assert late.receive() == Unlink()
    late.close()
    assert run.end() == []
    (warning,) = warned()
    assert "Node 2 did not reach this process" in warning


def test_the_rendezvous_waits_for_nodes_that_prepare_their_environment(
    run: FollowedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "REMINDER_SECONDS", SHORT)
    slow = [FakeNode(run.hub, number, prepares=True) for number in (1, 2)]
    first = FakeNode(run.hub, 0)
    first.send(Rendezvous("127.0.0.1", 1))
    with pytest.raises(queue.Empty):
        first.received.get(timeout=3 * SHORT)
    assert (
        "Waiting: the environment or the data is not ready on host1, host2."
        in capsys.readouterr().err
    )
    for node in slow:
        node.come_up()
    assert [node.receive() for node in (first, *slow)] == [Rendezvous("127.0.0.1", 1)] * NODES
    for node in (first, *slow):
        node.close()
    assert run.end() == []


def test_nodes_with_different_versions_fail_before_the_rendezvous(run: FollowedRun) -> None:
    versions = [{"torch": "2.12.0"}, {"torch": "2.13.0"}, {"torch": "2.13.0"}]
    nodes = [FakeNode(run.hub, number, versions[number]) for number in range(NODES)]
    nodes[0].send(Rendezvous("127.0.0.1", 1))

    received = nodes[1].receive()

    assert isinstance(received, Stop), "and no rendezvous"
    for node in nodes:
        node.close()
    error = run.error()
    assert isinstance(error, ExecutorNotReady)
    assert "2.12.0 on host0 (node 0); 2.13.0 on host1 (node 1), host2 (node 2)" in str(error)


def spark_reports(
    has_begun: bool, barrier_arrivals: Callable[[], tuple[int, int] | None] = lambda: None
) -> TaskStarts:
    """Return what Spark would report if it has started the tasks, or has not."""
    return TaskStarts(
        NODES,
        lambda: has_begun,
        lambda: "All slots are taken.",
        barrier_arrivals=barrier_arrivals,
    )


def none_in_barrier() -> tuple[int, int]:
    return 0, 0


def test_nodes_that_start_late_are_waited_for(
    start: Start, warned: Callable[[], list[str]]
) -> None:
    run = start(tasks=spark_reports(True, none_in_barrier), seconds=60)
    time.sleep(3 * SHORT)  # as if their Python took so long to start
    first = FakeNode(run.hub, 0)
    first.send(Rendezvous("127.0.0.1", 1))
    with pytest.raises(queue.Empty):
        first.received.get(timeout=3 * SHORT)
    nodes = [first, *(FakeNode(run.hub, number) for number in (1, 2))]
    for node in nodes:
        assert node.receive() == Rendezvous("127.0.0.1", 1), "not through Spark"
        node.close()
    assert run.end() == []
    assert warned() == []


def test_a_node_that_waits_in_a_barrier_has_failed_to_connect(
    start: Start, warned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "LINK_SECONDS", 60.0)
    arrivals = [(1, 0)]
    run = start(tasks=spark_reports(True, lambda: arrivals[-1]), seconds=60)
    first = FakeNode(run.hub, 0)
    with pytest.raises(queue.Empty):
        first.received.get(timeout=3 * SHORT)  # the third node may not come
    nodes = [first, FakeNode(run.hub, 1)]
    for node in nodes:
        assert node.receive() == Unlink()
        node.close()
    assert run.end() == []
    (warning,) = warned()
    assert "Node 2 did not reach this process" in warning


def test_ranks_that_have_not_started_end_the_run_at_start_timeout(
    start: Start,
) -> None:
    """Also once all nodes are up, and the other ranks run."""
    run = start(seconds=60)
    nodes = nodes_with_rendezvous(run)
    for node in nodes[:2]:
        node.send(RanksStarted())
        node.send(StackRequest())  # the controller passes it on, and so has received both
    for node in 2 * nodes:
        assert node.receive() == StackRequest()

    run.ahead = 60.0

    for node in nodes:
        assert node.receive() == StackRequest()
        node.send(Stacks({}))
    for node in nodes:
        assert isinstance(node.receive(), Stop)
        node.close()
    error = run.error()
    assert isinstance(error, StartTimeout)
    assert str(error) == "After start_timeout, still starting: rank 2 on host2."
    assert run.cancelled


def test_a_message_of_unknown_type_is_ignored_on_both_sides(run: FollowedRun) -> None:
    nodes = nodes_with_rendezvous(run)
    nodes[0].send("unknown")
    for node in nodes:
        node.send(RanksStarted())
        node.send(NodeDone())
    for node in nodes:
        assert node.receive() == Release()
        node.close()
    assert run.end() == []
    own = rank_settings(Settings())
    share = NodeShare(run_id="run", host="host0", ranks_per_node=1, secret=SECRET, settings=own)
    node_of_driver = Node(share)
    node_of_driver.receive("unknown")


def test_a_run_without_a_link_ends_a_minute_after_its_timeout(
    start: Start,
    warned: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its nodes enforce the timeout themselves, unless they hang."""
    monkeypatch.setattr(controller, "UNLINKED_STACKS_SECONDS", SHORT)
    run = start(tasks=spark_reports(True), settings={"timeout": 100}, seconds=60)
    until(lambda: bool(warned()), "the driver warns", SOON)

    run.ahead = 100.0 + UNLINKED_SECONDS / 2
    time.sleep(3 * SHORT)
    assert not run.cancelled, "the nodes have time to report it"
    run.ahead = 100.0 + UNLINKED_SECONDS

    error = run.error()
    assert isinstance(error, RunTimeout)
    assert "timeout of 100 s" in str(error)
    assert run.cancelled


def test_an_attempt_ends_after_a_checkpoint_if_there_is_room_for_more_ranks(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the launcher has room for is considered at intervals."""
    monkeypatch.setattr(Settings, "_resize_interval", 100.0)
    run = start(seconds=60)
    nodes = started_nodes(run)
    run.further_ranks = 2
    run.report_checkpoint()
    time.sleep(2 * SHORT)
    run.ahead = 100.0
    time.sleep(2 * SHORT)
    assert not run.cancelled, "only a checkpoint may end the attempt"
    run.report_checkpoint()
    for node in nodes:
        assert isinstance(node.receive(), Stop)
        node.close()
    error = run.error()
    assert isinstance(error, Resized)
    assert "continues from the checkpoint with 5 ranks" in str(error)


def test_a_node_that_is_preempted_is_known_to_all_nodes(run: FollowedRun) -> None:
    """And there is no need for more ranks while one is about to be lost."""
    nodes = started_nodes(run)
    nodes[1].send(Preempted())
    for node in nodes:
        assert node.receive() == Preempted(("host1",))
    run.further_ranks = 2
    run.report_checkpoint()
    time.sleep(2 * SHORT)
    assert not run.cancelled
    for node in nodes:
        node.close()
    assert run.end() == []


def test_a_stall_needs_idle_ranks_on_all_nodes(
    start: Start, warned: Callable[[], list[str]]
) -> None:
    run = start(settings={"stall_warning": 60.0, "stall_timeout": 100.0}, seconds=60)
    nodes = started_nodes(run)
    nodes[0].send(Idle(70.0))
    nodes[1].send(Idle(90.0))
    nodes[2].send(Idle(90.0))
    for node in nodes:
        assert node.receive() == StackRequest(), "for the warning"
        node.send(Stacks({0: "in step"}))
    until(lambda: bool(warned()), "the driver warns", SOON)
    nodes[1].send(Idle(0.0))
    nodes[2].send(Idle(200.0))
    nodes[0].send(Idle(200.0))
    with pytest.raises(queue.Empty):
        nodes[0].received.get(timeout=3 * SHORT)
    nodes[1].send(Idle(120.0))
    for node in nodes:
        assert node.receive() == StackRequest(), "for the error"
        node.send(Stacks({0: "in step"}))
        node.close()
    error = run.error()
    assert isinstance(error, RunStalled)
    assert error.stacks == {0: "in step"}
    assert len(warned()) == 1


def test_nodes_that_are_stopped_are_late_only_if_they_send_nothing() -> None:
    deadlines = Deadlines(0.0, None)
    deadlines.note_output(1.0)
    assert not deadlines.is_stop_overdue(1e9)
    deadlines.start_stop(10.0, in_vain=False)
    deadlines.note_output(12.0)
    assert [deadlines.is_stop_overdue(now) for now in (26.9, 27.1, 1e9)] == [False, True, False]
