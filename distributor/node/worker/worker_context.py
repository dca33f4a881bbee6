"""The state of a rank that its program can reach: one object for each process.

`main` creates it before the program starts. A process that the program forks inherits it, and its
metrics count as the rank's. A process that the program starts in another way is no rank, and has a
context that does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from distributor.core.telemetry import Progress, Reported
from distributor.node.worker.preemption_notices import PreemptionNotices


class WorkerContext:
    """What a rank reports, receives and has still to do.

    Parameters
    ----------
    send_control : callable, optional
        Sends a message to the rank's agent; None outside a rank.
    progress_file : int, optional
        Descriptor of the file that the agent reads for progress and metrics; None outside a rank.

    Attributes
    ----------
    preemption_notices : PreemptionNotices
        The notices that the run is about to lose a process.
    completed_steps : int
        Steps that the program has completed, in earlier attempts too; sent with its failure.
    uses_gpus : bool
        Whether the run's ranks use GPUs. If not, this process may still see some.
    rendezvous : tuple of str and int
        Host and port of the store that rank 0 serves, whatever the program sets.
    store : object
        Rank 0's rendezvous store. It serves the other ranks for as long as the process lives,
        because shutting it down would take time.
    secret : bytes
        Authenticates what the ranks exchange through that store, which anybody can write to.
    data : int or None
        Descriptor of the file with this node's part of the run's datasets; None if it has none.
    register_loader : callable or None
        Called with a bound method that returns a data loader's position, which each checkpoint then
        contains, and the loader's name. Returns the position to resume from, or None. It is None
        itself if the run stores no checkpoints.
    scratch : str
        A folder for temporary files, which is removed after the rank, even if the rank is killed.
    """

    def __init__(
        self,
        send_control: Callable[[bytes], object] | None = None,
        progress_file: int | None = None,
    ) -> None:
        self.preemption_notices = PreemptionNotices(send_control)
        self.completed_steps = 0
        self.uses_gpus = True
        self.rendezvous: tuple[str, int] = ("", 0)
        self.store: object = None
        self.secret = b""
        self.scratch = ""
        self.data: int | None = None
        self.register_loader: Callable[[Callable[[], Any], str], Any] | None = None
        self._progress_file = progress_file
        self._final_steps: list[Callable[[], object]] = []

    @property
    def is_rank(self) -> bool:
        """Whether this process is a rank, or was forked by one."""
        return self._progress_file is not None

    def send(self, update: Progress | Reported) -> None:
        """Send progress or a report to the driver, at the cost of one small write."""
        if self._progress_file is not None:
            os.write(self._progress_file, update.to_line())

    def add_final_step(self, step: Callable[[], object]) -> None:
        """Call `step` once the program has returned; if it raises, the rank has failed."""
        self._final_steps.append(step)

    def run_final_steps(self) -> None:
        """Call the final steps, in the order in which they were added."""
        while self._final_steps:
            self._final_steps.pop(0)()


_context = WorkerContext()


def worker_context() -> WorkerContext:
    """Return the context of this process."""
    return _context


def enter_worker(context: WorkerContext) -> None:
    """Make this process the rank that the context belongs to."""
    global _context
    _context = context
