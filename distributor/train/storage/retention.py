"""Decides which checkpoints are kept: the latest, and the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from distributor.core.checkpoint_config import CheckpointSettings
from distributor.train.storage.manifest import Manifest


def select_removable(
    committed: Sequence[tuple[str, Manifest]], settings: CheckpointSettings
) -> list[str]:
    """Return the names of the checkpoints that are neither the latest nor among the best.

    As in Ray Train, the latest is kept in addition to the ``num_to_keep`` best ones, and
    checkpoints that the user has named count too.

    Parameters
    ----------
    committed : sequence of pairs of str and Manifest
        The names and manifests of the checkpoints that exist, the oldest first.
    settings : CheckpointSettings
        How many of the best are kept, and by which metric they are ranked.
    """
    if settings.num_to_keep is None:
        return []
    best = ranked(committed, settings)[-settings.num_to_keep :]
    kept = {name for name, _ in [*best, *committed[-1:]]}
    return [name for name, _ in committed if name not in kept]


def ranked(
    committed: Sequence[tuple[str, Manifest]], settings: CheckpointSettings
) -> list[tuple[str, Manifest]]:
    """Return checkpoints from the worst to the best; by age if they are not ranked by a metric."""
    return sorted(committed, key=lambda pair: _rank_key(pair[1], settings))


def score_of(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return a metric by its name, or by a path such as ``val/loss``; None if it is no number."""
    found: Any = metrics.get(name)
    if found is None:
        found = metrics
        for key in name.split("/"):
            found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, (int, float)) and not math.isnan(found) else None


def _rank_key(manifest: Manifest, settings: CheckpointSettings) -> tuple[float, int]:
    """Return a sort key: the metric, which may be missing, then the age."""
    score = score_of(manifest.metrics, settings.score_attribute or "")
    if score is None:
        return -math.inf, manifest.index
    return (score if settings.score_order == "max" else -score), manifest.index
