"""A run and its attempts on the driver, and the interface of launchers."""

from __future__ import annotations

import contextlib
import enum
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from distributor.control.waiting import Cancellation, GracefulShutdown
from distributor.core.addresses import port_range
from distributor.core.text import counted
from distributor.core.threads import MessageQueue
from distributor.errors import DistributorError, RunTimeout, StartTimeout
from distributor.node.process.specs import NodeShare
from distributor.policies import FailedAttempts, activity_interval, is_preemption, limit_reached
from distributor.rank.messages import MemberState
from distributor.report.run_events import RunEvents
from distributor.run_spec import RunSpec, Settings
from distributor.screen.messages import LOGGER, RunLabel, notify, warn
from distributor.screen.run_block import RunBlock, RunProgress
from distributor.serialization.outcome import Failure, Value, cause_first
from distributor.settings import Listener, rank_settings
from distributor.spark.spark_job import CallSite
from distributor.wire.messages import Output
from distributor.wire.node_link import Links

ANSWER_TIMEOUT = 10.0
"""Seconds for the nodes of a run to answer."""

_lock = threading.Lock()
_active: dict[str, StackRequests] = {}


class StackRequests:
    """Requests for the stacks of one attempt's ranks. Its controller sets ``send``, and answers."""

    def __init__(self) -> None:
        self.send: Callable[[], object] | None = None
        self._waiting: queue.SimpleQueue[MessageQueue[dict[int, str]]] = queue.SimpleQueue()

    def stacks(self) -> dict[int, str]:
        """Send a request and wait for the answer; empty if the run has not begun, or ends."""
        if self.send is None:
            return {}
        answer: MessageQueue[dict[int, str]] = MessageQueue()
        self._waiting.put(answer)
        self.send()
        try:
            return answer.get(timeout=ANSWER_TIMEOUT)
        except queue.Empty:
            return {}

    def answer(self, stacks: dict[int, str]) -> None:
        """Answer all waiting requests."""
        while not self._waiting.empty():  # only its controller takes from it
            self._waiting.get().put(stacks)


@contextlib.contextmanager
def register_run(run_id: str, requests: StackRequests) -> Iterator[None]:
    """Make an attempt available to `stacks` while it is active."""
    with _lock:
        _active[run_id] = requests
    try:
        yield
    finally:
        with _lock:
            del _active[run_id]


def stacks() -> dict[str, dict[int, str]]:
    """Return the Python stacks of the ranks of this process's active runs, which continue.

    Must be called from another thread than the one that waits for the run, for example while
    a run of `TorchDistributor.submit` is active. ``distributor run`` prints the same on
    Ctrl-Backslash. Ranks that are stuck in C code are included, because ``faulthandler`` dumps
    the stacks: https://docs.python.org/3/library/faulthandler.html.

    Returns
    -------
    dict of str to dict of int to str
        For each active run, by its id: the stacks of its running ranks, by rank, the most recent
        call first. Ranks that have not started, and those of a node that is not connected to this
        process, are missing.

    Examples
    --------
    >>> future = TorchDistributor(2).submit(train)  # doctest: +SKIP
    >>> for run_id, stack_by_rank in distributor.stacks().items():
    ...     print(run_id, *stack_by_rank.values())  # doctest: +SKIP
    """
    with _lock:
        active = dict(_active)
    return {run_id: requests.stacks() for run_id, requests in active.items()}


class Datasets(Protocol):
    """The DataFrames among a run's arguments."""

    def opened(
        self, run_id: str, call_site: CallSite, pool: str | None, cancellation: Cancellation
    ) -> AbstractContextManager[None]:
        """Compute the DataFrames. Their rows are kept for the duration of the context."""

    def check(self, num_ranks: int) -> None:
        """Check that there are rows for so many ranks."""

    def hint(self, error: Exception) -> str | None:
        """Return which columns there are, if a rank has looked for another, which is the error."""

    def file(self) -> BinaryIO:
        """Return a file with all rows, for ranks on this machine."""


class Recorder(AbstractContextManager[None], Protocol):
    """Records a run while the context lasts."""

    def end(self, error: BaseException | None) -> None:
        """Record the end of the run, and its error, unless that is done."""


@dataclass(kw_only=True)
class Run:
    """A run on the driver: what is wanted, and the objects that all of its attempts share.

    Parameters
    ----------
    spec : RunSpec
        What the user wants.
    launcher : Launcher
        Starts the nodes of its attempts.
    datasets : Datasets or None
        The DataFrames among the arguments, if there are any.
    listeners : tuple of Listener
        Objects that follow the run, besides the console.
    label : RunLabel
        Marks its output and messages while other runs are active.
    block : RunBlock
        Shows it below a notebook's cell.
    call_site : CallSite
        The user's line that started the run; by default the line that created this object.
    cancellation : Cancellation
        Requests to end the run.
    graceful_shutdown : GracefulShutdown
        The state of this process's own shutdown.
    failed : FailedAttempts
        The attempts that have failed so far.
    recorder : Recorder or None
        Records it.
    folder : context manager
        Its folder in the storage, while the run lasts.
    resumption : callable
        Returns a message about the checkpoint from which it resumes, if there is one.
    has_status : bool
        Whether its state is shown, besides what ranks print.
    events : RunEvents
        Its event log, and the account of its time.
    warned : set of str
        Warnings that are not repeated in its further attempts.
    """

    spec: RunSpec
    launcher: Launcher
    datasets: Datasets | None = None
    listeners: tuple[Listener, ...] = ()
    label: RunLabel = field(default_factory=lambda: RunLabel("run"))
    block: RunBlock = field(default_factory=lambda: RunBlock(lambda: "run", {}))
    call_site: CallSite = field(default_factory=lambda: CallSite.of_caller("run"))
    cancellation: Cancellation = field(default_factory=Cancellation)
    graceful_shutdown: GracefulShutdown = field(default_factory=GracefulShutdown)
    failed: FailedAttempts = field(default_factory=FailedAttempts)
    recorder: Recorder | None = None
    folder: AbstractContextManager[None] = field(default_factory=nullcontext)
    resumption: Callable[[], str | None] = lambda: None
    has_status: bool = True
    events: RunEvents = field(default_factory=RunEvents)
    warned: set[str] = field(default_factory=set)

    def warn_once(self, message: str) -> None:
        """Show a warning unless an attempt of this run has shown it."""
        if message not in self.warned:
            self.warned.add(message)
            warn(message)

    def notify(self, message: str, logger: str = LOGGER) -> None:
        """Show a message about this run."""
        notify(self.label.message(message), logger)


@dataclass(kw_only=True)
class Attempt:
    """One attempt of a run: its size, and what has happened so far.

    Parameters
    ----------
    run : Run
        The run.
    number : int
        The number of the attempt, from 0.
    num_ranks : int
        The number of its ranks.
    failures : list of Failure
        Failures of its ranks, in the order in which this process received them.
    raised : dict of int to Failure
        The failures that the attempt's error reports, by rank, the cause first.
    preempted : dict of str to list of int
        The hosts that are about to lose a process, or have lost it to another application, with
        their ranks.
    silent : tuple of str
        The hosts that stopped answering.
    progress : RunProgress
        Its progress.
    numbers : sequence of int
        The ranks that were members at the end: all of them, unless survivors went on.
    survived : list of Failure
        Failures of ranks without which the others went on.
    on_member_state : callable
        Called with a rank and what it reports about its membership.
    trained : dict of int to bool
        The ranks in which an optimizer has made steps, and whether they have had a process group.
    stack_requests : StackRequests
        Requests for the stacks of its ranks.
    """

    run: Run
    number: int = 0
    num_ranks: int
    failures: list[Failure] = field(default_factory=list)
    raised: dict[int, Failure] = field(default_factory=dict)
    preempted: dict[str, list[int]] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    progress: RunProgress = field(init=False)
    numbers: Sequence[int] = field(init=False)
    survived: list[Failure] = field(default_factory=list)
    on_member_state: Callable[[int, MemberState], object] = lambda rank, state: None
    trained: dict[int, bool] = field(default_factory=dict)
    stack_requests: StackRequests = field(default_factory=StackRequests)

    def __post_init__(self) -> None:
        self.progress = RunProgress(self.num_ranks)
        self.numbers = range(self.num_ranks)

    @property
    def spec(self) -> RunSpec:
        return self.run.spec

    @property
    def settings(self) -> Settings:
        return self.run.spec.settings

    @property
    def cause(self) -> Failure | None:
        """The failure of the rank that caused the attempt's error, if a rank did."""
        return next(iter(self.raised.values()), None)

    def note_end(self, ranks: Iterable[int], state: str) -> None:
        """Note the end of ranks."""
        self.progress.end(ranks, state)
        self.run.events.add("ended", ranks=list(ranks), state=state)

    def announce(self) -> None:
        """Show the first message of the attempt: run id, program and log folder."""
        suffix = f", attempt {self.number}" if self.number else ""
        logs = f"; logs in {self.spec.logs}" if self.spec.logs else ""
        message = f"Run {self.spec.run_id} of {self.run.label.name}{suffix}{logs}"
        notify(message)

    @property
    def may_be_followed(self) -> bool:
        """Whether there may be another attempt, now that ranks of this one have failed."""
        cause = next(iter(cause_first(self.failures).values()), None)
        is_preempted = is_preemption(None, cause, self.preempted, self.silent)
        is_last = self.limit_reached_by(is_preempted) is not None
        return not (is_last or self.run.graceful_shutdown.sigterm_received)

    def limit_reached_by(self, is_preempted: bool) -> str | None:
        """Return which limit one more failure would exceed, if it would."""
        failed, settings = self.run.failed, self.settings
        counts = failed.all + 1, failed.num_preempted + is_preempted, is_preempted
        return limit_reached(*counts, settings.max_failures, settings.max_preemption_failures)


def share_of(attempt: Attempt, num_nodes: int, secret: bytes) -> NodeShare:
    """Return what all nodes of an attempt have; launchers and nodes fill in the rest.

    Parameters
    ----------
    attempt : Attempt
        The attempt.
    num_nodes : int
        How many nodes there are, each with as many ranks.
    secret : bytes
        Authenticates what the ranks exchange.
    """
    spec, settings = attempt.spec, attempt.settings
    return NodeShare(
        run_id=spec.run_id,
        attempt=attempt.number,
        program_name=spec.program.name,
        num_nodes=num_nodes,
        ranks_per_node=attempt.num_ranks // num_nodes,
        keep_all=spec.keep_all,
        env=dict(spec.env),
        secret=secret,
        rank_ports=port_range("rank_ports", settings.rank_ports),
        activity_interval=activity_interval(settings.stall_warning, settings.stall_timeout),
        settings=rank_settings(settings),
    )


class Resized(DistributorError):
    """An attempt has ended after a checkpoint, so that the next one has more ranks."""


class Launcher:
    """Starts the nodes of attempts. Subclasses have `capacity`, `start` and `describe`."""

    shares_disk = False
    """Whether the ranks certainly reach the files of this machine."""

    def capacity(self, run: Run, silent: Collection[str]) -> int:
        """Return how many of the run's ranks there is room for.

        Parameters
        ----------
        run : Run
            The run.
        silent : collection of str
            Hosts that stopped answering in the previous attempt.
        """
        raise NotImplementedError

    def room(self) -> int | None:
        """Return how many ranks there is room for at once, beside each other.

        None if that is not known.
        """
        return None

    @property
    def ranks_per_task(self) -> int:
        """How many ranks are started together: a run has a multiple of it."""
        return 1

    @property
    def grows(self) -> bool:
        """Whether there is more room once a run waits for it."""
        return False

    def check_room(self, num_ranks: int) -> None:
        """Check that there can ever be room for so many ranks."""

    def opened(self, run: Run) -> AbstractContextManager[Launcher]:
        """Return what launches the attempts of one run.

        It may keep what it has started for further attempts, until the context ends.
        """
        return nullcontext(self)

    def start(self, attempt: Attempt, deadline: float) -> AbstractContextManager[Handle]:
        """Announce an attempt, and start its nodes; none is left when the context ends.

        Parameters
        ----------
        attempt : Attempt
            The attempt.
        deadline : float
            When, by ``time.monotonic``, its ranks must have started.
        """
        raise NotImplementedError

    def describe(self) -> dict[str, object]:
        """Return where the ranks run, as tags of the run's record."""
        raise NotImplementedError

    def training(self, num_ranks: int) -> str:
        """Return how messages name a run of this size."""
        return f"training with {counted(num_ranks, 'process', 'processes')}"

    def check(self, settings: Settings) -> None:
        """Check what may keep a run from starting, although its settings are valid."""

    def hint(self, error: Exception, spec: RunSpec) -> str | None:
        """Return why a rank lacks a module or file that this process has, if that is the error."""
        return None

    def thread(self, target: Callable[[], object]) -> threading.Thread:
        """Return a thread that can launch a run on behalf of the calling one."""
        context = copy_context()
        return threading.Thread(target=lambda: context.run(target), name="run", daemon=True)


class NodeStarts:
    """What a launcher knows of nodes that have not reported: here, that all of them will.

    A launcher whose nodes can also do without a link has a subclass, which asks the cluster.
    """

    was_polled = False
    """Whether the cluster was asked."""
    begun: bool | None = True
    """Whether it has started all nodes; None if it does not know."""
    began_at = -math.inf
    """When they were known to have started, by ``time.monotonic``."""
    arrivals: tuple[int, int] | None = (0, 0)
    """How many nodes have failed to connect and wait for the others, and how often all have come.

    None if the launcher does not notice such nodes.
    """

    @property
    def are_unknown(self) -> bool:
        """Whether the launcher was asked, and does not know whether the nodes have started."""
        return self.was_polled and self.begun is None

    @property
    def are_pending(self) -> bool:
        """Whether it has not started them."""
        return self.begun is False

    @property
    def have_started(self) -> bool:
        """Whether it has started all of them."""
        return self.began_at < math.inf

    @property
    def reports_unlinked(self) -> bool:
        """Whether it notices nodes that have failed to connect."""
        return self.arrivals is not None

    @property
    def num_unlinked(self) -> int:
        """How many nodes have failed to connect, as long as they wait for the others."""
        return self.arrivals[0] if self.arrivals else 0

    @property
    def all_unlinked(self) -> bool:
        """Whether all nodes have failed to connect."""
        return self.arrivals is not None and self.arrivals[1] > 0

    def poll(self) -> None:
        """Ask the cluster, at most once a second."""

    def all_started_for(self, seconds: float) -> bool:
        """Return whether all nodes were started at least so many seconds ago."""
        return time.monotonic() >= self.began_at + seconds

    def show_shortfall(self) -> None:
        """Show, at intervals, that nothing was received from the nodes."""

    def shortfall(self) -> str:
        """Return a sentence that nothing was received from the nodes, and why that may be."""
        return "nothing was received from the nodes of this run."


@dataclass(frozen=True)
class NodesLeaving:
    """Hosts that the cluster is about to take a process from, and a sentence about it.

    `executors` names these processes, and `nodes` has the nodes in them, if that is known.
    """

    hosts: frozenset[str]
    text: str
    executors: frozenset[str] = frozenset()
    nodes: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Handle:
    """The nodes of an attempt, as their launcher has started them.

    Their ends arrive in the links' queue: `NodeEnded` for each, or `NodesEnded` for all.

    Parameters
    ----------
    links : Links
        The driver's end of the nodes' links.
    num_nodes : int
        The number of nodes, each with as many ranks.
    cancel : callable
        Ends all nodes. Called if an error is raised, or nodes do not stop, before they have ended.
    starts : NodeStarts
        What the launcher knows of nodes that have not reported.
    leaving : callable
        Returns hosts, among these, that the cluster is about to take a process from, each once.
    further_ranks : callable
        Returns how many ranks more an attempt that begins now would have.
    max_nodes : int
        How many nodes the attempt may have, if ranks can join it.
    replace : callable
        Starts, if there is room, some of these nodes, whose ranks join; returns which.
    describe_unlinked : callable
        Returns a warning about a run without links, as the nodes in its argument have none.
    """

    links: Links
    num_nodes: int
    cancel: Callable[[], object] = lambda: None
    starts: NodeStarts = field(default_factory=NodeStarts)
    leaving: Callable[[Collection[str]], NodesLeaving | None] = lambda hosts: None
    further_ranks: Callable[[], int] = lambda: 0
    max_nodes: int = 0
    replace: Callable[[Collection[int]], Collection[int]] = lambda nodes: ()
    describe_unlinked: Callable[[str], str] = lambda nodes: f"{nodes} did not reach this process."


class RunEvent(enum.Enum):
    """What changes the state of an attempt."""

    ALL_NODES_UP = "all nodes have a link and have reported, and rank 0's store has an address"
    NODES_UNLINKED = "nodes have no link, although the launcher has started them, or may have"
    RANKS_STARTED = "every node has reported that its ranks run"
    FAILURE_SETTLED = "a rank failed, and others have had the time to report failures of their own"
    DEADLINE_PASSED = "start_timeout, timeout or stall_timeout has passed; ranks may have stacks"
    NODES_ENDED = "all nodes have ended, or one of them with an error"
    ERROR_RAISED = "a deadline passed, a node was lost, or the run was cancelled or interrupted"
    DRAINED = "all links are closed, or the time for it is over"


def _same(error: BaseException, first_lost: str) -> Exception:
    assert isinstance(error, Exception)
    return error


@dataclass(frozen=True)
class NodeEnded:
    """Launcher to controller: one node has ended, perhaps with an error.

    `explain` is as in `NodesEnded`.
    """

    node: int
    error: Exception | None = None
    explain: Callable[[BaseException, str], Exception] = _same


@dataclass(frozen=True)
class LossExplained:
    """Controller to itself: why a node was lost without which the others go on.

    `failures` are those of its ranks. `is_preemption` is whether the cluster manager took it back,
    and the loss was counted as another failure.
    """

    node: int
    text: str
    failures: Sequence[Failure]
    is_preemption: bool


@dataclass(frozen=True, kw_only=True)
class NodesEnded:
    """Launcher to controller: all nodes have ended.

    Parameters
    ----------
    error : BaseException or None
        What ended them, if they did not end by themselves.
    failures : sequence of Failure
        Failures of ranks that nodes without a link have reported.
    timed_out : RunTimeout, StartTimeout or None
        The deadline that has passed on a node without a link.
    values : callable
        Returns the values of ranks that no link has carried, by rank.
    output : iterable of Output
        What ranks printed or reported and no link has carried.
    explain : callable
        Returns an exception for `error` if no rank has reported a failure. Its second argument
        has the ranks and the host of the first node that lost its link, if there is one.
    """

    error: BaseException | None = None
    failures: Sequence[Failure] = ()
    timed_out: RunTimeout | StartTimeout | None = None
    values: Callable[[], Mapping[int, Value]] = dict
    output: Iterable[Output] = ()
    explain: Callable[[BaseException, str], Exception] = _same
