"""The driver's sink for the ranks' output and reports: console, ``log_dir`` and listeners."""

from __future__ import annotations

from collections import defaultdict

from distributor.control.listeners import OVERHEAD, Listeners
from distributor.control.run import Attempt
from distributor.node.agent.log_files import LogFiles
from distributor.rank.messages import Reader, Record, Reported, Trained
from distributor.run.settings import Settings
from distributor.screen.console import Console
from distributor.wire.messages import Source, Stream


class DriverSink:
    """Shows the ranks' output, writes all of it under ``log_dir``, and calls the listeners."""

    def __init__(self, attempt: Attempt, listeners: Listeners) -> None:
        run, settings, progress = attempt.run, attempt.settings, attempt.progress
        self._attempt = attempt
        self._console = Console(
            lambda rank: _is_shown(settings, rank),
            prefix=lambda rank: run.label.prefix(rank, attempt.num_ranks),
            status=lambda: progress.line(run.label.name),
            has_progress=lambda: progress.is_reported,
        )
        run.block.follow(progress)
        self._files: LogFiles | None = None
        if settings.log_dir is not None:
            self._files = LogFiles(settings.log_dir, run.spec.run_id, attempt.number)
        self._listeners = listeners
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
        for rank, failure in (received | raised).items():
            if failure.step is not None:  # a rank that died has no traceback
                self._add_output(
                    rank, "stderr", failure.text.encode(errors="backslashreplace"), show=not raised
                )

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
        if isinstance(record, Trained):
            self._attempt.trained[rank] = record.has_had_group
        elif isinstance(record, Reported):
            self._attempt.progress.checkpoints += record.checkpoint is not None
            self._attempt.run.block.note_report(record)
            self._listeners.call(lambda listener: listener.reported(record))
            if record.preempted and record.checkpoint is not None:
                self._attempt.run.graceful_shutdown.checkpoint_reported()
        elif source == "progress":
            if rank == 0:
                self._attempt.progress.update(record)
            self._listeners.call(lambda each: each.progressed(rank, record), OVERHEAD)
        else:
            self._listeners.call(lambda listener: listener.used(record), OVERHEAD)

    def tick(self) -> None:
        """Update what is shown, and write what has waited. Called again and again.

        If a listener has raised an exception, this raises it.
        """
        self._console.tick()
        self._attempt.run.block.tick()
        self._listeners.check()


def _is_shown(settings: Settings, rank: int) -> bool:
    """Return whether a rank's output is shown."""
    if isinstance(settings.show_output, str):
        return settings.show_output == "all"
    return rank in settings.show_output
