"""Which checkpoints are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from distributor.core.checkpoint_config import CheckpointSettings
from distributor.errors import DistributorError
from distributor.train.storage.checkpoint_store import Manifest


def superfluous(
    committed: Sequence[tuple[str, Manifest]], checkpoint_settings: CheckpointSettings
) -> list[str]:
    """Name the checkpoints that need not be kept: neither the latest, nor among the best.

    As in Ray Train, the latest is kept beside so many of the best, and those count that the user
    has named.

    Parameters
    ----------
    committed : sequence of pairs of str and Manifest
        Those that exist, the oldest first.
    checkpoint_settings : CheckpointSettings
        How many of the best are kept, and by what they are judged.
    """
    if checkpoint_settings.num_to_keep is None:
        return []
    ranked = sorted(committed, key=lambda pair: _worth(pair[1], checkpoint_settings))
    kept = {name for name, _ in [*ranked[-checkpoint_settings.num_to_keep :], *committed[-1:]]}
    return [name for name, _ in committed if name not in kept]


def check_score(metrics: Mapping[str, Any], checkpoint_settings: CheckpointSettings) -> None:
    """Refuse metrics without the one that checkpoints are judged by.

    Raises
    ------
    DistributorError
        Where it is not there, or is no number.
    """
    name = checkpoint_settings.score_attribute
    if name is not None and not isinstance(metrics.get(name), (int, float)):
        raise DistributorError(
            f"checkpoint_score_attribute is {name!r}, but what was reported with the checkpoint "
            f"has no such number: {dict(metrics)}."
        )


def _worth(manifest: Manifest, checkpoint_settings: CheckpointSettings) -> tuple[float, int]:
    """Judge a checkpoint: by its metric, which may be missing, then by its age."""
    score = manifest.metrics.get(checkpoint_settings.score_attribute or "")
    if not isinstance(score, (int, float)) or math.isnan(score):
        return -math.inf, manifest.index
    return (score if checkpoint_settings.score_order == "max" else -score), manifest.index
