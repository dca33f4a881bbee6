"""Decides which checkpoints are kept: the latest, and the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from distributor.core.checkpoint_config import CheckpointSettings
from distributor.errors import DistributorError
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
    ranked = sorted(committed, key=lambda pair: _rank_key(pair[1], settings))
    kept = {name for name, _ in [*ranked[-settings.num_to_keep :], *committed[-1:]]}
    return [name for name, _ in committed if name not in kept]


def check_score(metrics: Mapping[str, Any], settings: CheckpointSettings) -> None:
    """Check that metrics include the one that checkpoints are ranked by.

    Raises
    ------
    DistributorError
        If it is missing, or is not a number.
    """
    name = settings.score_attribute
    if name is not None and not isinstance(metrics.get(name), (int, float)):
        raise DistributorError(
            f"checkpoint_score_attribute is {name!r}, but the metrics that were reported with the "
            f"checkpoint contain no such number: {dict(metrics)}."
        )


def _rank_key(manifest: Manifest, settings: CheckpointSettings) -> tuple[float, int]:
    """Return a sort key: the metric, which may be missing, then the age."""
    score = manifest.metrics.get(settings.score_attribute or "")
    if not isinstance(score, (int, float)) or math.isnan(score):
        return -math.inf, manifest.index
    return (score if settings.score_order == "max" else -score), manifest.index
