"""Failures of ranks, without the secrets that their texts may contain."""

from __future__ import annotations

from dataclasses import replace

from distributor.core.redaction import Redaction
from distributor.node.agent.worker_handle import WorkerHandle
from distributor.serialization.outcome import Failure, death


def failure_at_exit(worker: WorkerHandle, returncode: int, redaction: Redaction) -> Failure:
    """Return the failure of a rank whose process ended without reporting an outcome."""
    tail = redaction.of_text(worker.tail())
    if returncode < 0:
        return death(worker.origin, signum=-returncode, tail=tail)
    return death(worker.origin, exit_code=returncode, tail=tail)


def redact(failure: Failure, redaction: Redaction) -> Failure:
    """Return a copy of the failure without secrets."""
    return replace(
        failure,
        summary=redaction.of_text(failure.summary),
        text=redaction.of_text(failure.text),
    )
