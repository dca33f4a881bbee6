"""A run and its attempts on the driver, and the interface of launchers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from distributor.control.graceful_shutdown import Cancellation, GracefulShutdown
from distributor.control.stack_requests import StackRequests
from distributor.core.addresses import port_range
from distributor.core.text import counted
from distributor.errors import DistributorError, RunTimeout, StartTimeout
from distributor.node.process.specs import NodeShare
from distributor.policies import FailedAttempts, activity_interval, is_preemption, limit_reached
from distributor.run_spec import RunSpec, Settings
from distributor.screen.messages import LOGGER, RunLabel, notify
from distributor.screen.run_block import RunBlock, RunProgress
from distributor.serialization.outcome import Failure, Value, cause_first
from distributor.settings.fields import rank_settings
from distributor.settings.listener import Listener
from distributor.spark.spark_job import CallSite
from distributor.wire.messages import Output
from distributor.wire.node_link import Links


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
    trained: dict[int, bool] = field(default_factory=dict)
    stack_requests: StackRequests = field(default_factory=StackRequests)

    def __post_init__(self) -> None:
        self.progress = RunProgress(self.num_ranks)

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

    def announce(self) -> None:
        """Show the first message of the attempt: run id, program and log folder."""
        notify(self._heading())

    def _heading(self) -> str:
        suffix = f", attempt {self.number}" if self.number else ""
        logs = f"; logs in {self.spec.logs}" if self.spec.logs else ""
        return f"Run {self.spec.run_id} of {self.run.label.name}{suffix}{logs}"

    @property
    def may_be_followed(self) -> bool:
        """Whether there may be another attempt, now that ranks of this one have failed."""
        cause = next(iter(cause_first(self.failures).values()), None)
        is_preempted = is_preemption(None, cause, self.preempted, self.silent)
        limits = self.settings.max_failures, self.settings.max_preemption_failures
        failed = self.run.failed
        counts = failed.count + 1, failed.num_preempted + is_preempted, is_preempted
        is_last = limit_reached(*counts, *limits) is not None
        return not (is_last or self.run.graceful_shutdown.sigterm_received)


def share_of(attempt: Attempt, num_nodes: int, ranks_per_node: int, secret: bytes) -> NodeShare:
    """Return what all nodes of an attempt have; launchers and nodes fill in the rest.

    Parameters
    ----------
    attempt : Attempt
        The attempt.
    num_nodes, ranks_per_node : int
        How many nodes there are, and how many ranks on each.
    secret : bytes
        Authenticates what the ranks exchange.
    """
    spec, settings = attempt.spec, attempt.settings
    return NodeShare(
        run_id=spec.run_id,
        attempt=attempt.number,
        program_name=spec.program.name,
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
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

    A launcher whose nodes can also do without a link has a subclass.
    """

    @property
    def are_unknown(self) -> bool:
        """Whether the launcher was asked, and does not know whether the nodes have started."""
        return False

    @property
    def are_pending(self) -> bool:
        """Whether it has not started them."""
        return False

    @property
    def have_started(self) -> bool:
        """Whether it has started all of them."""
        return True

    @property
    def reports_unlinked(self) -> bool:
        """Whether it notices nodes that have failed to connect."""
        return True

    @property
    def num_unlinked(self) -> int:
        """How many nodes have failed to connect, as long as they wait for the others."""
        return 0

    @property
    def all_unlinked(self) -> bool:
        """Whether all nodes have failed to connect."""
        return False

    def poll(self) -> None:
        """Ask the cluster, at most once a second."""

    def all_started_for(self, seconds: float) -> bool:
        """Return whether all nodes were started at least so many seconds ago."""
        return True

    def show_shortfall(self) -> None:
        """Show, at intervals, that nothing was received from the nodes."""

    def shortfall(self) -> str:
        """Return a sentence that nothing was received from the nodes, and why that may be."""
        return "nothing was received from the nodes of this run."


@dataclass(frozen=True)
class NodesLeaving:
    """Hosts that the cluster is about to take a process from, and a sentence about it."""

    hosts: frozenset[str]
    text: str


@dataclass(frozen=True, kw_only=True)
class Handle:
    """The nodes of an attempt, as their launcher has started them.

    Their ends arrive in the links' queue: `NodeEnded` for each, or `NodesEnded` for all.

    Parameters
    ----------
    links : Links
        The driver's end of the nodes' links.
    num_nodes, ranks_per_node : int
        The number of nodes, and of ranks on each.
    training : str
        How messages name a run of this size.
    cancel : callable
        Ends all nodes. Called if an error is raised, or nodes do not stop, before they have ended.
    starts : NodeStarts
        What the launcher knows of nodes that have not reported.
    leaving : callable
        Returns hosts, among these, that the cluster is about to take a process from, each once.
    further_ranks : callable
        Returns how many ranks more an attempt that begins now would have.
    describe_unlinked : callable
        Returns a warning about a run without links, as the nodes in its argument have none.
    """

    links: Links
    num_nodes: int
    ranks_per_node: int
    training: str
    cancel: Callable[[], object] = lambda: None
    starts: NodeStarts = field(default_factory=NodeStarts)
    leaving: Callable[[Collection[str]], NodesLeaving | None] = lambda hosts: None
    further_ranks: Callable[[], int] = lambda: 0
    describe_unlinked: Callable[[str], str] = lambda nodes: f"{nodes} did not reach this process."


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
