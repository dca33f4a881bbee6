"""Messages between a rank and its agent, and the progress and metrics that a rank reports.

Messages are single bytes on the control channel. Reports are one line of JSON each, in a file or on
the wire.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Messages of a rank: work begins, and how it ended. The byte after ``EXIT`` is the exit code.
STARTED, VALUE, FAILURE, EXIT = b"S", b"V", b"F", b"X"
# Messages of a rank about preemption: it subscribed to notices, SIGTERM alone no longer ends it,
# and a SIGTERM has come.
SUBSCRIBED, IGNORES_SIGTERM, SIGTERM_RECEIVED = b"H", b"D", b"A"
# Messages of the agent: the rank may leave, it prints very many lines, it is to write down its last
# collectives, and the run is about to lose a process, on another host or on this one.
RELEASE, MANY_LINES, COLLECTIVES, NOTICE, NOTICE_HERE = b"R", b"M", b"C", b"N", b"P"
# The members have changed; a line of JSON follows.
MEMBERS = b"G"
SECRET_BYTES = 32  # bytes of the attempt's secret, with which the agent begins


@dataclass(frozen=True)
class Progress:
    """The progress of a rank, with the metrics that it measured, as a `Listener` receives it.

    Parameters
    ----------
    done : float
        How much is done, in any unit: steps, samples, epochs.
    total : float or None
        How much there is to do, in the same unit; None if it is unknown.
    metrics : mapping of str to float
        The metrics.
    at : float
        The time of the report, in seconds since the epoch.
    """

    done: float
    total: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    at: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Reported:
    """A report of all ranks by ``distributor.train.report``, as a `Listener` receives it.

    Parameters
    ----------
    metrics : sequence of mappings of str to object
        The metrics of each rank, in rank order, as JSON values.
    checkpoint : str or None
        The path or URI of the committed checkpoint; None if none was reported.
    preempted : bool
        Whether the ranks had received a preemption notice before the report.
    number : int
        Its number, from 1. Those up to the checkpoint from which an attempt resumes count too.
    seconds : float
        From rank 0's call to the commit.
    """

    metrics: Sequence[Mapping[str, Any]]
    checkpoint: str | None = None
    preempted: bool = False
    number: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Trained:
    """What a rank reports at its end if an optimizer has made steps in it.

    Parameters
    ----------
    has_had_group : bool
        Whether the rank has ever been in a process group.
    """

    has_had_group: bool


@dataclass(frozen=True)
class RanksUse:
    """What the ranks of a node have done and used by now, which their agent reports.

    Parameters
    ----------
    ranks : sequence of sequence of float
        For each rank: its number, and the fields of `Counters` up to ``stopped``.
    """

    ranks: Sequence[Sequence[float]]


@dataclass(frozen=True)
class MemberState:
    """What a rank reports about its membership, of a run whose survivors go on.

    Parameters
    ----------
    state : str
        "able" (to go on without a lost rank) or "unable"; "waiting" for newer members; "formed" or
        "unformed", of its group; "ready" to join; "finished".
    reason : str
        Why it is unable.
    generation : int
        Of its group.
    rank : int
        Its rank there, if it has finished.
    """

    state: str
    reason: str = ""
    generation: int = 0
    rank: int = 0


Record = Progress | Reported | Trained | RanksUse | MemberState
_KINDS: dict[str, type[Record]] = {
    kind.__name__: kind for kind in (Progress, Reported, Trained, RanksUse, MemberState)
}


def line_of(record: Record) -> bytes:
    """Return a report as one line of JSON: its kind, and its fields."""
    return json.dumps([type(record).__name__, vars(record)]).encode() + b"\n"


class Reader:
    """Assembles reports from a stream of bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[Record]:
        """Return the reports that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return list(filter(None, map(_read, lines)))


def _read(line: bytes) -> Record | None:
    try:
        kind, fields = json.loads(line)
        return _KINDS[kind](**fields)
    except (KeyError, TypeError, ValueError):
        return None  # a rank's own code has written into the file


def checked(done: Any, total: Any, metrics: Mapping[str, Any]) -> Progress:
    """Return progress with plain numbers, converted from tensors or numpy's types."""
    return Progress(
        done=_number("done", done),
        total=None if total is None else _number("total", total),
        metrics={name: _number(name, value) for name, value in metrics.items()},
    )


def _number(name: str, value: Any) -> float:
    if type(value) in (float, int):
        return value  # type: ignore[no-any-return]  # the common case, at no cost
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        found = f"progress takes numbers, but {name} is "
        if not hasattr(value, "__len__") or isinstance(value, str) or hasattr(value, "dtype"):
            raise TypeError(f"{found}{value!r}.") from None
        size = len(value)  # of what tqdm would take
        each = f"step in range({size})"
        if value != range(size):
            each = "step, item in enumerate(...)"
        loop = f"for {each}: ...; progress(step + 1, {size})"
        raise TypeError(
            f"{found}of type {type(value).__name__}. Call it in a loop: {loop}"
        ) from None
