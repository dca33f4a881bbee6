"""A run: its program, size and settings, and the launcher that starts it."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from distributor.launch.call_site import CallSite
from distributor.launch.cancellation import Cancellation
from distributor.launch.graceful_shutdown import GracefulShutdown
from distributor.launch.hangs.stack_requests import StackRequests
from distributor.launch.output.labels import RunLabel
from distributor.launch.output.messages import LOGGER, notify
from distributor.launch.output.run_progress import RunProgress
from distributor.launch.run_listener import Listener
from distributor.launch.settings import Settings
from distributor.node.agent.output.sink import Sink
from distributor.serialization.outcome import Failure, Outcome
from distributor.serialization.program import Program

if TYPE_CHECKING:
    from distributor.launch.spark.datasets.collection import Datasets


@dataclass(frozen=True, kw_only=True)
class Job:
    """One attempt of a run: what each rank runs, on how many ranks, and with which settings.

    Parameters
    ----------
    program : Program
        What each rank runs.
    num_processes : int
        The number of ranks; before the attempt's size is known, the maximum.
    min_processes : int
        The minimum number of ranks, if the cluster has no room for more.
    settings : Settings
        The user's settings.
    datasets : Datasets or None
        The DataFrames among the arguments, if there are any.
    env : mapping of str to str
        Environment variables of every rank: the user's, and the run's own.
    keep_all : bool
        Whether the values of all ranks are returned, and not only rank 0's.
    listeners : tuple of Listener
        Objects that follow the run, besides the console.
    run_id : str
        The run's id.
    label : RunLabel
        Marks its output and messages while other runs are active.
    call_site : CallSite
        The user's line that started the run; by default the line that created this job.
    attempt : int
        The number of the attempt, from 0.
    silent : tuple of str
        Hosts that stopped answering in the previous attempt.
    failures : list of Failure
        Failures of this attempt's ranks, in the order in which this process received them.
    preempted : dict of str to list of int
        The hosts of this attempt that are about to lose a process, with their ranks.
    progress : RunProgress
        This attempt's progress.
    stack_requests : StackRequests
        Requests for the stacks of this attempt's ranks.
    cancellation : Cancellation
        Requests to end the run.
    graceful_shutdown : GracefulShutdown
        The state of this process's own shutdown.
    """

    program: Program
    num_processes: int
    min_processes: int
    settings: Settings
    datasets: Datasets | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    keep_all: bool = False
    listeners: tuple[Listener, ...] = ()
    run_id: str = field(default_factory=lambda: new_run_id())
    label: RunLabel = field(default_factory=lambda: RunLabel("run"))
    call_site: CallSite = field(default_factory=lambda: CallSite.of_caller("run"))
    attempt: int = 0
    silent: tuple[str, ...] = ()
    failures: list[Failure] = field(default_factory=list)
    preempted: dict[str, list[int]] = field(default_factory=dict)
    progress: RunProgress = field(default_factory=RunProgress)
    stack_requests: StackRequests = field(default_factory=StackRequests)
    cancellation: Cancellation = field(default_factory=Cancellation)
    graceful_shutdown: GracefulShutdown = field(default_factory=GracefulShutdown)

    @property
    def heading(self) -> str:
        """The first message of an attempt: run id, program and log folder."""
        suffix = f", attempt {self.attempt}" if self.attempt else ""
        logs = f"; logs in {self.logs}" if self.logs else ""
        return f"Run {self.run_id} of {self.label.name}{suffix}{logs}"

    @property
    def logs(self) -> Path | None:
        """The folder of the run's output, if it is stored."""
        log_dir = self.settings.log_dir
        return Path(log_dir) / self.run_id if log_dir else None

    def notify(self, message: str, logger: str = LOGGER) -> None:
        """Show a message about this run."""
        notify(self.label.message(message), logger)

    @property
    def may_be_followed(self) -> bool:
        """Whether there may be another attempt if this one fails."""
        limit = self.settings.max_failures
        return not self.graceful_shutdown.sigterm_received and not 0 <= limit <= self.attempt

    def for_attempt(self, attempt: int, silent: tuple[str, ...]) -> Job:
        """Return the job of a new attempt, without the state of the previous one."""
        return replace(
            self,
            attempt=attempt,
            silent=silent,
            failures=[],
            preempted={},
            progress=RunProgress(),
            stack_requests=StackRequests(),
        )


class Launcher(Protocol):
    """Starts the ranks of a job and watches them until they have ended."""

    @property
    def shares_disk(self) -> bool:
        """Whether the ranks certainly reach the files of this machine."""

    def training(self, num_processes: int) -> str:
        """Return how messages name a run of this size, as PySpark's class names it."""

    def check(self, settings: Settings) -> None:
        """Check what may keep a run from starting, although its settings are valid."""

    def prepare(self, settings: Settings, num_processes: int) -> None:
        """Start in advance what the first run would otherwise wait for."""

    def resolve_size(self, job: Job) -> tuple[Launcher, int]:
        """Return how many of the job's ranks there is room for, and a launcher of that size."""

    def launch(self, job: Job, sink: Sink) -> list[Outcome]:
        """Run all ranks; return the outcomes of the ranks that ended by themselves."""

    def hint(self, error: Exception, job: Job) -> str | None:
        """Return why a rank lacks a module or file that this process has, if that is the error."""

    def describe(self) -> dict[str, object]:
        """Return where the ranks run, as tags of the run's record."""

    def thread(self, target: Callable[[], object]) -> threading.Thread:
        """Return a thread that can launch a run on behalf of the calling one."""


def new_run_id() -> str:
    """Return a unique run id."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
