"""The driver's sink for the ranks' output and reports: console, ``log_dir`` and listeners."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

from distributor._compat.cpython import stack_of
from distributor.control.run import Attempt
from distributor.core.text import counted
from distributor.errors import RunCancelled
from distributor.node.agent.output import LogFiles
from distributor.rank.messages import MemberState, RanksUse, Reader, Record, Reported, Trained
from distributor.screen.console import Console
from distributor.screen.messages import notify, warn
from distributor.serialization.outcome import Failure
from distributor.settings import Listener
from distributor.wire.messages import Source, Stream

MAX_WAITING = 64 * 2**20
"""Bytes of telemetry that may wait for the listeners; beyond it the latest is dropped."""
OVERHEAD = 1024
"""Bytes that telemetry costs beside the output in it."""
SOON = 1.0
"""Seconds that the end of a run waits for the listeners without a message."""
PATIENCE, SHORT_PATIENCE = 60.0, 5.0
"""Seconds that it waits for one call to return and for telemetry to be passed on, and the same if
the run was cancelled or interrupted."""

Method = Callable[[Listener], object]


class Listeners:
    """Calls a run's listeners in the order of events, on a thread of its own; a context manager.

    Telemetry is dropped while too much of it waits; all other calls are kept. If a listener raises,
    none is called again, and `check` or the end of the context raises the exception.

    Parameters
    ----------
    listeners : sequence of Listener
        The listeners.
    thread : callable
        Returns a thread that calls a function.
    """

    def __init__(
        self,
        listeners: Sequence[Listener],
        thread: Callable[[Callable[[], object]], threading.Thread],
    ) -> None:
        self._listeners = listeners
        self._thread = thread(self._run) if listeners else None
        self._calls: queue.SimpleQueue[tuple[Method, int] | None] = queue.SimpleQueue()
        # Only the run's thread changes the one, and only the listeners' thread the others.
        self._bytes_put = 0
        self._bytes_taken = self._num_returned = 0
        self._has_dropped = self._is_late = False
        self._error: BaseException | None = None

    def __enter__(self) -> Listeners:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if self._thread:
            is_cut_short = kind and issubclass(kind, (RunCancelled, KeyboardInterrupt))
            self._calls.put(None)
            self._wait(self._thread, SHORT_PATIENCE if is_cut_short else PATIENCE)
        self.check()

    def call(self, method: Method, num_bytes: int = 0) -> None:
        """Have each listener called, after all earlier calls.

        Telemetry, which has a number of bytes, is dropped while too much of it waits.
        """
        if num_bytes and self._bytes_put - self._bytes_taken > MAX_WAITING:
            self._drop()
        elif self._listeners:
            self._bytes_put += num_bytes
            self._calls.put((method, num_bytes))

    def attempt_begins(self, attempt: int, num_ranks: int) -> None:
        self.call(lambda listener: listener.begins(attempt, num_ranks))

    def attempt_failed(self, attempt: int, error: Exception) -> None:
        """Have each listener called for a failed attempt. A cancelled attempt has not failed."""
        if not isinstance(error, RunCancelled):
            self.call(lambda listener: listener.failed(attempt, error))

    def check(self) -> None:
        """Raise the exception of a listener, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _drop(self) -> None:
        if not self._has_dropped:
            self._has_dropped = True
            warn(
                "A listener or callback is slower than the ranks, so it does not receive all of "
                "their output and metrics. It receives all reports."
            )

    def _run(self) -> None:
        try:
            while self._listeners and (call := self._calls.get()) is not None:
                method, num_bytes = call
                if num_bytes and self._is_late:
                    self._drop()
                else:
                    for listener in self._listeners:
                        method(listener)
                self._bytes_taken += num_bytes
                self._num_returned += 1
        except BaseException as error:  # SystemExit too: the run ends with it
            self._listeners = ()
            self._error = error

    def _wait(self, thread: threading.Thread, seconds: float) -> None:
        """Wait for the remaining calls as long as they return."""
        thread.join(SOON)
        if thread.is_alive():
            notify("The ranks have ended. Waiting for the run's listeners (callbacks, MLflow).")
        before = -1
        while thread.is_alive() and before < self._num_returned:
            before = self._num_returned
            thread.join(seconds)
            self._is_late = True
        if thread.is_alive():
            self._listeners = ()
            num_left = self._calls.qsize() - 1  # without the end
            warn(
                f"A listener or callback has not returned for {seconds:g} s. The run ends without "
                f"it, and leaves out {counted(num_left, 'further call')}. It is {stack_of(thread)}"
            )


class DriverSink:
    """Shows the ranks' output, writes all of it under ``log_dir``, and calls the listeners."""

    def __init__(self, attempt: Attempt, listeners: Listeners) -> None:
        run, settings, progress = attempt.run, attempt.settings, attempt.progress
        self._attempt = attempt
        shown = settings.show_output
        self._console = Console(
            lambda rank: shown == "all" if isinstance(shown, str) else rank in shown,
            prefix=lambda rank: run.label.prefix(rank, attempt.num_ranks),
            status=lambda: progress.line(run.label.name) if run.has_status else "",
            has_progress=lambda: run.has_status and progress.is_reported,
        )
        run.block.follow(progress)
        self._files: LogFiles | None = None
        if settings.log_dir is not None:
            self._files = LogFiles(settings.log_dir, run.spec.run_id, attempt.number)
        self._listeners = listeners
        self._num_reports = 0
        self._readers: defaultdict[tuple[int, Source], Reader] = defaultdict(Reader)

    def __enter__(self) -> DriverSink:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._add_tracebacks()
        finally:
            self._console.close()
            if self._files:
                self._files.close()

    def _add_tracebacks(self) -> None:
        """Add ranks' tracebacks to their output; show them only if no error is raised with them."""
        raised = self._attempt.raised
        received = {failure.origin.rank: failure for failure in self._attempt.failures}
        for failure in self._attempt.survived:
            if failure.step is not None and failure not in self._attempt.failures:
                self._add_output(failure.origin.rank, "stderr", _bytes_of(failure), show=False)
        for rank, failure in (received | raised).items():
            if failure.step is not None:  # a rank that died has no traceback
                self._add_output(rank, "stderr", _bytes_of(failure), show=not raised)

    def write(self, rank: int, source: Source, data: bytes) -> None:
        if source == "stdout" or source == "stderr":
            self._add_output(rank, source, data)
        else:
            for record in self._readers[rank, source].take(data):
                self._add_record(rank, source, record)

    def _add_output(self, rank: int, stream: Stream, data: bytes, *, show: bool = True) -> None:
        if show:
            self._attempt.run.block.note_output(rank, data)
            self._console.write(rank, stream, data)
        if self._files:
            self._files.write(rank, stream, data)
        size = len(data) + OVERHEAD
        self._listeners.call(lambda listener: listener.printed(rank, stream, data), size)

    def _add_record(self, rank: int, source: Source, record: Record) -> None:
        events = self._attempt.run.events
        if isinstance(record, Trained):
            self._attempt.trained[rank] = record.has_had_group
        elif isinstance(record, MemberState):
            self._attempt.on_member_state(rank, record)
        elif isinstance(record, RanksUse):
            events.note_use(record)
        elif isinstance(record, Reported):
            if record.number <= self._num_reports:
                return  # a rank was lost that has sent it, and others have made it again
            self._num_reports = record.number
            self._attempt.progress.checkpoints += record.checkpoint is not None
            events.add_report(
                {
                    "number": record.number,
                    "checkpoint": record.checkpoint,
                    "seconds": round(record.seconds, 3),
                    "metrics": record.metrics[0],
                }
            )
            self._attempt.run.block.note_report(record)
            self._listeners.call(lambda listener: listener.reported(record))
            if record.preempted and record.checkpoint is not None:
                self._attempt.run.graceful_shutdown.checkpoint_reported()
        elif source == "progress":
            if rank == 0:
                self._attempt.progress.update(record)
                events.note_progress(record.done, record.total, record.metrics)
            self._listeners.call(lambda each: each.progressed(rank, record), OVERHEAD)
        else:
            self._listeners.call(lambda listener: listener.used(record), OVERHEAD)

    def tick(self) -> None:
        """Update what is shown, and write what has waited. Called again and again.

        If a listener has raised an exception, this raises it.
        """
        self._console.tick()
        run = self._attempt.run
        if run.events.tick() and run.block.is_shown:
            run.block.verdict = run.events.verdict
        run.block.tick()
        self._listeners.check()


def _bytes_of(failure: Failure) -> bytes:
    return failure.text.encode(errors="backslashreplace")
