"""The one loop: launch, look at the outcomes, return the values or raise the failure."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from distributor.errors import DistributorError
from distributor.launch.console import Console
from distributor.launch.inquiry import going_on
from distributor.launch.job import Job, Launcher
from distributor.node.logs import LogFiles
from distributor.wire.messages import Source, Stream
from distributor.wire.outcome import Failure, Outcome, Value, cause_first, raise_first
from distributor.wire.progress import Progress, Reader


def run(job: Job, launcher: Launcher) -> list[Any]:
    """Run a job and give what its ranks returned.

    Returns
    -------
    list
        Rank 0's value alone, or every rank's in rank order where the job keeps all.

    Raises
    ------
    Exception
        What the failing rank raised, with its ``rank_failures``.
    """
    with DriverSink(job) as sink, going_on(job.run_id, job.inquiry):
        outcomes = launcher.launch(job, sink)
    return values_of(job, outcomes)


def values_of(job: Job, outcomes: list[Outcome]) -> list[Any]:
    """Load the values that were asked for, or raise the first cause of failure."""
    try:
        failures = cause_first(outcome for outcome in outcomes if isinstance(outcome, Failure))
        if failures:
            raise_first(failures)
        values = {outcome.rank: outcome for outcome in outcomes if isinstance(outcome, Value)}
        wanted = range(job.num_processes) if job.keep_all else [0]
        if missing := [rank for rank in wanted if rank not in values]:
            raise DistributorError(f"No outcome came from rank(s) {missing}, and no failure.")
        return [_load(values[rank]) for rank in wanted]
    finally:
        for outcome in outcomes:
            if isinstance(outcome, Value):
                outcome.file.close()


def _load(value: Value) -> Any:
    try:
        return value.load()
    except Exception as error:
        raise DistributorError(
            f"Rank {value.rank} returned a value that cannot be loaded here: {error!r}. "
            "What it is made of must be importable in this process too."
        ) from error


class DriverSink:
    """Shows the ranks' output here, keeps all of it under ``log_dir``, and tells who listens."""

    def __init__(self, job: Job) -> None:
        log_dir, standing = job.settings.log_dir, job.standing
        self._console = Console(
            job.settings.shows,
            headline=lambda: standing.line(job.program.name, job.num_processes),
            reported=lambda: standing.told,
        )
        self._files = LogFiles(Path(log_dir) / job.run_id) if log_dir is not None else None
        self._standing = standing
        self._listeners = job.listeners
        self._readers: defaultdict[tuple[int, Source], Reader] = defaultdict(Reader)

    def __enter__(self) -> DriverSink:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._console.close()
        if self._files:
            self._files.close()

    def write(self, rank: int, source: Source, data: bytes) -> None:
        if source == "stdout" or source == "stderr":
            self._note_print(rank, source, data)
        else:
            note = self._note_progress if source == "progress" else self._note_usage
            for told in self._readers[rank, source].take(data):
                note(rank, told)

    def _note_print(self, rank: int, stream: Stream, data: bytes) -> None:
        self._console.write(rank, stream, data)
        if self._files:
            self._files.write(rank, stream, data)
        for listener in self._listeners:
            listener.printed(rank, stream, data)

    def _note_progress(self, rank: int, progress: Progress) -> None:
        if rank == 0:
            self._standing.note(progress)
        for listener in self._listeners:
            listener.progressed(rank, progress)

    def _note_usage(self, rank: int, usage: Progress) -> None:
        for listener in self._listeners:
            listener.used(usage)

    def room(self) -> bool:
        self._console.tick()
        return True
