"""Progress and metrics that ranks report: one line of JSON each, in a file or on the wire."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


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

    def to_line(self) -> bytes:
        return json.dumps([self.done, self.total, self.metrics, self.at]).encode() + b"\n"


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
    """

    metrics: Sequence[Mapping[str, Any]]
    checkpoint: str | None = None
    preempted: bool = False

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


Message = Progress | Reported
"""What one line of JSON holds."""


class Reader:
    """Assembles messages from a stream of bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[Message]:
        """Return the messages that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return list(filter(None, map(_read, lines)))


def _read(line: bytes) -> Message | None:
    try:
        message = json.loads(line)
        if isinstance(message, dict):
            return Reported(**message)
        done, total, metrics, at = message
        return Progress(done, total, metrics, at)
    except (TypeError, ValueError):
        return None  # a rank's own code has written into the file


def checked(done: Any, total: Any, metrics: Mapping[str, Any]) -> Progress:
    """Return progress with plain numbers, converted from tensors or numpy's types.

    Raises
    ------
    TypeError
        If a value is not a number; the message names it.
    """
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
        raise TypeError(f"progress takes numbers, but {name} is {value!r}.") from None
