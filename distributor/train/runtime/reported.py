"""The checkpoints of a run that exist, and the wait for their validations."""

from __future__ import annotations

import time

from distributor.core.checkpoint_config import CheckpointSettings
from distributor.errors import DistributorError
from distributor.train.checkpoint import ReportedCheckpoint, ReportedCheckpointStatus
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.retention import ranked

TIMEOUT_SECONDS = 24 * 3600.0
"""Seconds that a rank waits for validations if it sets no limit."""
LATE_WARNING_SECONDS = 60.0
"""Seconds after which a rank prints which validations it is waiting for."""
POLL_SECONDS = 0.5
"""Seconds between two looks at the results of validations, which the driver writes."""


def reported_checkpoints(
    storage: Storage, settings: CheckpointSettings
) -> list[ReportedCheckpoint]:
    """List the checkpoints that exist, the best or the latest last."""
    return [
        ReportedCheckpoint(
            storage.checkpoint(name),
            dict(manifest.metrics),
            ReportedCheckpointStatus[manifest.status],
        )
        for name, manifest in ranked(storage.committed(), settings)
    ]


def wait_for_validations(storage: Storage, deadline: float | None) -> None:
    """Wait until the checkpoints that exist now have been validated.

    Parameters
    ----------
    storage : Storage
        The run's folder.
    deadline : float or None
        When to return in any case, by `time.monotonic`; None for no limit of the caller's.

    Raises
    ------
    DistributorError
        Without a deadline, after a day.
    """
    start = time.monotonic()
    end = start + TIMEOUT_SECONDS if deadline is None else deadline
    warn_at = start + LATE_WARNING_SECONDS
    pending = [name for name, manifest in storage.committed() if manifest.is_pending]
    while pending and (left := end - time.monotonic()) > 0:
        time.sleep(min(POLL_SECONDS, left))
        pending = [name for name in pending if storage.is_pending(name)]
        if pending and time.monotonic() > warn_at:
            warn_at = end
            print(f"distributor: {_waits(start, pending)}.", flush=True)
    if pending and deadline is None:
        raise DistributorError(f"{_waits(start, pending)}, and no longer.")


def _waits(start: float, pending: list[str]) -> str:
    return (
        f"After {time.monotonic() - start:.0f} s, get_all_reported_checkpoints still waits for the "
        f"validation of {', '.join(pending)}"
    )
