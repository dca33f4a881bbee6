"""Decides which checkpoints are kept: the latest, the best, and those yet to be validated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distributor.core.checkpoint_config import CheckpointSettings
from distributor.filesystems import describe_error
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.manifest import Manifest


def remove_surplus(storage: Storage, settings: CheckpointSettings) -> list[str]:
    """Remove the checkpoints that are not kept, and describe those that could not be removed."""
    if settings.num_to_keep is None:
        return []  # the manifests need not be read
    return remove_all(storage, select_removable(storage.committed(), settings))


def remove_all(storage: Storage, names: Iterable[str]) -> list[str]:
    """Remove checkpoints, and describe those that could not be removed."""
    failures = []
    for name in names:
        try:
            storage.remove(name)
        except Exception as error:
            failures.append(f"{name} could not be removed: {describe_error(error)}.")
    return failures


def select_removable(
    committed: Sequence[tuple[str, Manifest]], settings: CheckpointSettings
) -> list[str]:
    """Return the names of those checkpoints, the oldest first, that are not kept."""
    # As in Ray Train, the latest and those that are yet to be validated are kept in addition to the
    # `num_to_keep` best ones, and checkpoints that the user has named count too.
    best = _best(committed, settings)
    pending = [pair for pair in committed if pair[1].is_pending]
    kept = {name for name, _ in [*best, *committed[-1:], *pending]}
    return [name for name, _ in committed if name not in kept]


def ranked(
    committed: Sequence[tuple[str, Manifest]], settings: CheckpointSettings
) -> list[tuple[str, Manifest]]:
    """Return checkpoints from the worst to the best; by age if they are not ranked by a metric."""
    return sorted(committed, key=lambda pair: _rank_key(pair[1], settings))


def best_of(committed: Sequence[tuple[str, Manifest]]) -> list[tuple[str, Manifest]]:
    """Return the checkpoints that are kept for their rank, from the worst to the best.

    The latest is missing if it is kept for its age alone. Its manifest says how they are ranked.
    """
    if not committed:
        return []
    settings = CheckpointSettings(storage_path="", name="", **committed[-1][1].retention)
    return _best(committed, settings)


def _best(
    committed: Sequence[tuple[str, Manifest]], settings: CheckpointSettings
) -> list[tuple[str, Manifest]]:
    best = ranked(committed, settings)
    return best if settings.num_to_keep is None else best[-settings.num_to_keep :]


def score_of(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return a metric by its name, or by a path such as ``val/loss``; None if it is no number."""
    found: Any = metrics.get(name)
    if found is None:
        found = metrics
        for key in name.split("/"):
            found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, (int, float)) and not math.isnan(found) else None


def _rank_key(manifest: Manifest, settings: CheckpointSettings) -> tuple[float, int]:
    score = score_of(manifest.metrics, settings.score_attribute or "")
    if score is None:
        return -math.inf, manifest.index
    return (score if settings.score_order == "max" else -score), manifest.index
