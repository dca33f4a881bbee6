"""How a rank ended: a value or a failure, captured in the rank and raised on the driver."""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from distributor._compat.torch import LOST_CONNECTION
from distributor.core.cell_errors import with_cell_names
from distributor.core.resources import (
    container_memory,
    describe_free_space,
    format_bytes,
    lacks_room,
)
from distributor.core.text import listed
from distributor.errors import (
    DistributorError,
    NodeLost,
    OtherRankFailed,
    RemoteError,
    RemoteTraceback,
    WorkerDied,
)
from distributor.serialization import oob_pickle, pickling

PART_BYTES = 1024 * 1024
MAX_SUMMARY, MAX_TEXT = 1000, 4 * 1024 * 1024  # characters of a failure's summary and text


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A rank, its host and its attempt."""

    rank: int
    local_rank: int
    host: str
    attempt: int = 0

    def __str__(self) -> str:
        return (
            f"rank {self.rank} (local rank {self.local_rank}) on {self.host}, "
            f"attempt {self.attempt}"
        )


@dataclass(frozen=True)
class Value:
    """The value that a rank returned, still pickled."""

    rank: int
    file: BinaryIO  # anonymous

    @property
    def size(self) -> int:
        """Its size in bytes when pickled; 0 if it was not requested."""
        self.file.flush()
        return os.fstat(self.file.fileno()).st_size

    def load(self) -> Any:
        self.file.flush()
        return oob_pickle.unpack(self.file.fileno())

    def parts(self) -> Iterator[memoryview]:
        """Yield the pickled value in parts that are small enough for any transport."""
        if size := self.size:
            whole = memoryview(mmap.mmap(self.file.fileno(), size, prot=mmap.PROT_READ))
            for start in range(0, size, PART_BYTES):
                yield whole[start : start + PART_BYTES]


def load_value(path: str | os.PathLike[str]) -> Any:
    """Load a value that could not be sent to the driver.

    Parameters
    ----------
    path : str or path
        The file that `ValueTooLarge` names. It is unpickled, so it must come from a trusted run.

    Returns
    -------
    object
        The rank's value. Its CUDA tensors are CPU tensors.

    Raises
    ------
    OSError
        If the file cannot be read.
    Exception
        If the value cannot be unpickled in this process.

    Examples
    --------
    >>> value = distributor.load_value("/mnt/values/rank0.value")  # doctest: +SKIP
    """
    with open(os.path.expanduser(path), "rb") as file:
        return oob_pickle.unpack(file.fileno())


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rank failed, as plain data that any process can unpickle."""

    origin: Origin
    summary: str
    text: str  # the remote traceback, or the last lines of output
    pickled: bytes | None  # None if the exception cannot be pickled
    collateral: bool = False  # whether it looks like a consequence of another rank's failure
    step: int | None = None  # steps that the program had made, if it raised
    kind: str = "failed"  # may appear in logs, unlike a message, which may contain a secret

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Only the driver knows the cells of its notebook.
        vars(self).update(state, text=with_cell_names(state["text"]))

    def __str__(self) -> str:
        return f"{self.origin}:\n{self.text.rstrip()}"

    def exception(self) -> BaseException:
        """Rebuild the rank's exception, with its remote traceback as the cause."""
        error = pickling.load_exception(self.pickled) if self.pickled else None
        if error is None:
            error = RemoteError(f"{self.origin}: {self.summary}\n\n{self.text}")
        if not isinstance(error, WorkerDied):  # its message is complete
            cause = RemoteTraceback(str(self))
            BaseException.__setattr__(error, "__cause__", cause)  # the user's class may be frozen
        return error


Outcome = Value | Failure


def failure_of(error: BaseException, origin: Origin, step: int = 0) -> Failure:
    """Capture an exception that was raised in a rank after this many steps of its program."""
    return Failure(
        origin=origin,
        summary=_summary_of(error),
        text=_cut(format_traceback(error)) + (describe_free_space() if lacks_room(error) else ""),
        pickled=pickling.dump_exception(error),
        collateral=_is_consequence(error),
        step=step,
        kind=type(error).__qualname__,
    )


def _summary_of(error: BaseException) -> str:
    """Return the line that names the exception, without the lines of its source and notes."""
    lines = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()
    name = type(error).__qualname__
    named = (line for line in lines if line.partition(":")[0].endswith(name))
    return (next(named, lines[-1]) + _checkpoint_cause(error))[:MAX_SUMMARY]


def _checkpoint_cause(error: BaseException) -> str:
    """Return why torch.distributed.checkpoint failed: the line that names its error does not."""
    module = sys.modules.get("torch.distributed.checkpoint.api")
    if module is None or not isinstance(error, module.CheckpointException):
        return ""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f": rank {rank}: {_summary_of(cause)}"


def _cut(text: str) -> str:
    """Omit the middle of a text that is too long for a message."""
    left_out, half = len(text) - MAX_TEXT, MAX_TEXT // 2
    if left_out <= 0:
        return text
    return f"{text[:half]}\n... {left_out} characters left out ...\n{text[-half:]}"


def death(origin: Origin, returncode: int, tail: str = "") -> Failure:
    """Describe a rank that ended without recording an outcome, by its exit code or minus signal."""
    exit_code, signum = (None, -returncode) if returncode < 0 else (returncode, None)
    how = f"was killed by {_signal_name(signum)}" if signum else f"exited with code {exit_code}"
    hint = _hint(signum)
    output = f"Its last output:\n{tail}" if tail else "It printed nothing."
    error = WorkerDied(f"{origin} {how}.\n{output}{hint}", exit_code=exit_code, signal=signum)
    return Failure(
        origin=origin,
        summary=f"WorkerDied: {how}",
        text=f"{how}\n{output}{hint}",
        pickled=pickle.dumps(error),
        kind=f"WorkerDied: {how}",
    )


def loss(origin: Origin, cause: str, error: type[DistributorError] = NodeLost) -> Failure:
    """Describe a rank that was lost with its node, or was ended, by a sentence about that."""
    return Failure(
        origin=origin,
        summary=f"{error.__name__}: {cause}",
        text=cause,
        pickled=pickle.dumps(error(f"{origin}: {cause}")),
        kind=error.__name__,
    )


def _hint(signum: int | None) -> str:
    if signum == signal.SIGKILL:
        container = container_memory()
        limit = container and (
            f" The limit of its container is {format_bytes(container.most)}; for executors, "
            "spark.executor.memoryOverhead raises it."
        )
        return (
            "\nNothing in this run sent that signal. On Linux it was most often the out-of-memory "
            "killer: look at the kernel log of that host, and use a smaller batch or fewer ranks "
            "per host. It may also have been the cluster manager: look at its log."
            f"{limit or ''}"
        )
    if signum == signal.SIGBUS:
        return f"\nMost often shared memory or a disk is full. {describe_free_space()}"
    return ""


def cause_first(failures: Iterable[Failure]) -> dict[int, Failure]:
    """Map each failed rank to its failure, causes before collateral failures, else as given."""
    ordered = sorted(failures, key=lambda failure: failure.collateral)
    return {failure.origin.rank: failure for failure in ordered}


def raise_first(failures: Mapping[int, Failure]) -> None:
    """Raise the first failure's exception, with the mapping as its ``rank_failures``."""
    first = next(iter(failures.values()))
    error = first.exception()
    error.__dict__["rank_failures"] = dict(failures)  # bypasses __setattr__, as in `add_note`
    # The message of a rank that died begins with the rank.
    raised_by = "" if isinstance(error, WorkerDied) else f"Raised by {first.origin}."
    if note := f"{raised_by}\n{_also_failed(first, failures)}".strip():
        add_note(error, note)
    raise error


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception."""
    # BaseException.add_note is not in Python 3.10, and a user's frozen exception refuses it.
    error.__dict__.setdefault("__notes__", []).append(note)


def format_traceback(error: BaseException) -> str:
    """Format an exception's traceback from the user's first frame on."""
    trimmed = _users_part(error.__traceback__)
    report = traceback.TracebackException(type(error), error, trimmed, compact=True)
    return "".join(report.format())


def _also_failed(first: Failure, failures: Mapping[int, Failure]) -> str:
    ranks_by_summary: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        if failure is not first:
            ranks_by_summary.setdefault(failure.summary, []).append(rank)
    return "\n".join(
        f"Also failed: {listed('rank', sorted(ranks))}: {summary}"
        for summary, ranks in ranks_by_summary.items()
    )


_OURS = str(Path(__file__).resolve().parent.parent)


def _users_part(frames: TracebackType | None) -> TracebackType | None:
    """Skip the first frames, which belong to the launcher or run a script."""
    part = frames
    while part is not None:
        filename = part.tb_frame.f_code.co_filename
        if not filename.startswith(_OURS + os.sep + "node") and "runpy" not in filename:
            break
        part = part.tb_next
    return part or frames


def _is_consequence(error: BaseException) -> bool:
    """Return whether an error is of the kind that a rank gets when another rank has failed."""
    if isinstance(error, (ConnectionError, OtherRankFailed)):
        return True
    is_torchs = type(error).__module__.startswith("torch") or type(error) is RuntimeError
    return is_torchs and any(sign in str(error).lower() for sign in LOST_CONNECTION)


def _signal_name(signum: int) -> str:
    return next((each.name for each in signal.Signals if each == signum), f"signal {signum}")
