"""A node's failures, inside the text of the exception that ends its Spark task."""

from __future__ import annotations

import base64
import contextlib
import pickle
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distributor.core.text import printable
from distributor.errors import RunTimeout, StartTimeout
from distributor.serialization.outcome import Failure
from distributor.wire.protocol import seal, unseal

LIMIT = 100_000  # characters of failure text in a report; Spark keeps texts up to 200 kB whole
MAX_KINDS = 2000  # characters of the readable part


class TaskFailed(Exception):
    """Ends a task without a link whose ranks failed; `failures_in` reads it.

    Spark writes its text to the event log, the UI and the executors' logs. An exception's message
    and arguments may contain a secret, so the readable text names only the ranks that failed, their
    hosts and the types of their exceptions.
    """

    @classmethod
    def of(cls, failures: Sequence[Failure], secret: bytes) -> TaskFailed:
        """Report failures."""
        kinds = "; ".join(f"{failure.origin}: {failure.kind}" for failure in failures)
        report = _encode(failures, secret)
        return cls(
            f"{printable(kinds[:MAX_KINDS])} (the driver raises the whole error)\n"
            f"<distributor-report {report}>"
        )

    @classmethod
    def timed_out(cls, error: StartTimeout | RunTimeout, secret: bytes) -> TaskFailed:
        """Report that a deadline passed on a node; `timeout_in` reads it."""
        message = str(error)
        encoded = _sealed(error, secret)
        if len(encoded) > LIMIT:
            encoded = _sealed(type(error)(message[: LIMIT // 4]), secret)
        summary = printable(message.partition("\n")[0])
        return cls(f"{type(error).__name__}: {summary}\n<distributor-timeout {encoded}>")


_TIMEOUT = re.compile(r"<distributor-timeout ([A-Za-z0-9+/=]+)>")
_REPORT = re.compile(r"<distributor-report ([A-Za-z0-9+/=]+)>")


def failures_in(text: str, secret: bytes) -> list[Failure]:
    """Return the failures inside the text of Spark's exception.

    Nothing is unpickled that was not sealed with the run's secret.
    """
    found: dict[int, Failure] = {}
    for encoded in _REPORT.findall(text):
        with contextlib.suppress(Exception):  # truncated, or text that only looks like a report
            for failure in _unsealed(encoded, secret):
                found.setdefault(failure.origin.rank, failure)
    return list(found.values())


def timeout_in(text: str, secret: bytes) -> StartTimeout | RunTimeout | None:
    """Return the timeout error inside the text of Spark's exception, if there is one."""
    if found := _TIMEOUT.search(text):
        with contextlib.suppress(Exception):  # truncated, or text that only looks like a report
            error = _unsealed(found[1], secret)
            if isinstance(error, (StartTimeout, RunTimeout)):
                return error
    return None


def _sealed(content: object, secret: bytes) -> str:
    return base64.b64encode(seal(zlib.compress(pickle.dumps(content)), secret)).decode()


def _unsealed(encoded: str, secret: bytes) -> Any:
    return pickle.loads(zlib.decompress(unseal(base64.b64decode(encoded), secret)))


def _encode(failures: Sequence[Failure], secret: bytes, room: int = LIMIT // 4) -> str:
    encoded = _sealed(list(failures), secret)
    if len(encoded) > LIMIT and len(failures) > 1:
        return _encode(failures[:1], secret)
    if len(encoded) > LIMIT:
        first = failures[0]
        text, summary = first.text[-room:], first.summary[:room]
        shortened = replace(first, pickled=None, text=text, summary=summary)
        return _encode([shortened], secret, room // 2)
    return encoded
