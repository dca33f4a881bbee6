"""A node's failures inside the text of the exception that ends its Spark task."""

from __future__ import annotations

import base64
import contextlib
import pickle
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace

from distributor.errors import RunTimeout, StartTimeout
from distributor.wire.outcome import Failure

LIMIT = 100_000
"""Characters of failure text that a report may carry; Spark passes 200 kB through whole."""


class TaskFailed(Exception):
    """Ends a barrier task whose ranks failed or were stopped; read back by `failures_in`."""

    @classmethod
    def of(cls, failures: Sequence[Failure]) -> TaskFailed:
        """Report failures, or, where there are none, that the node was told to stop."""
        if not failures:
            return cls("The ranks of this node were stopped because the run ended elsewhere.")
        summaries = "; ".join(f"{failure.origin}: {failure.summary}" for failure in failures)
        return cls(f"{summaries[:2000]}\n<distributor-report {_encode(failures)}>")

    @classmethod
    def timed_out(cls, error: StartTimeout | RunTimeout) -> TaskFailed:
        """Report that a deadline passed on a node; read back by `timeout_in`."""
        message = str(error)
        encoded = _encoded(error)
        if len(encoded) > LIMIT:
            encoded = _encoded(type(error)(message[: LIMIT // 4]))
        summary = message.partition("\n")[0]
        return cls(f"{type(error).__name__}: {summary}\n<distributor-timeout {encoded}>")


_TIMEOUT = re.compile(r"<distributor-timeout ([A-Za-z0-9+/=]+)>")
_REPORT = re.compile(r"<distributor-report ([A-Za-z0-9+/=]+)>")


def failures_in(text: str) -> list[Failure]:
    """Read the failures back from the text of Spark's exception.

    The text comes through Spark, which authenticates executors, as code and rows do.
    """
    found: dict[int, Failure] = {}
    for encoded in _REPORT.findall(text):
        with contextlib.suppress(Exception):  # cut, or a text that only looks like a report
            for failure in pickle.loads(zlib.decompress(base64.b64decode(encoded))):
                found.setdefault(failure.origin.rank, failure)
    return list(found.values())


def timeout_in(text: str) -> StartTimeout | RunTimeout | None:
    """Read a deadline's error back from the text of Spark's exception; None if there is none."""
    if found := _TIMEOUT.search(text):
        with contextlib.suppress(Exception):  # cut, or a text that only looks like a report
            error = pickle.loads(zlib.decompress(base64.b64decode(found[1])))
            if isinstance(error, (StartTimeout, RunTimeout)):
                return error
    return None


def _encoded(content: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(content))).decode()


def _encode(failures: Sequence[Failure], room: int = LIMIT // 4) -> str:
    encoded = _encoded(list(failures))
    if len(encoded) > LIMIT and len(failures) > 1:
        return _encode(failures[:1])
    if len(encoded) > LIMIT:
        first = failures[0]
        text, summary = first.text[-room:], first.summary[:room]
        return _encode([replace(first, pickled=None, text=text, summary=summary)], room // 2)
    return encoded
