"""The positions of data loaders that checkpoints contain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distributor.core.checkpoint_config import CheckpointSettings
from distributor.core.text import counted
from distributor.errors import DistributorError
from distributor.train.checkpoint import Checkpoint
from distributor.train.storage.checkpoint_store import Storage


def stored_positions(checkpoint: Checkpoint | None) -> Mapping[str, Any]:
    """Read the positions of data loaders from a checkpoint's manifest."""
    if checkpoint is None:
        return {}
    root, _, name = checkpoint.path.rpartition("/")
    manifest = Storage.at(checkpoint.filesystem, root).manifest_of(name)
    return manifest.positions if manifest else {}


def latest_positions(
    settings: CheckpointSettings, filesystem: Any = None, resume_from: Checkpoint | None = None
) -> Mapping[str, Any]:
    """Read the positions from which a run resumes, unless its latest checkpoint is damaged.

    Parameters
    ----------
    settings : CheckpointSettings
        The run's storage.
    filesystem : FileSystem, optional
        The file system of the storage path; by default the one that the path names.
    resume_from : Checkpoint, optional
        The checkpoint to start from as long as the run has none of its own.
    """
    storage = Storage(settings.storage_path, settings.name, filesystem)
    committed = storage.committed()
    return stored_positions(storage.checkpoint(committed[-1][0]) if committed else resume_from)


def check_in_step(positions: Sequence[Mapping[str, Any]]) -> None:
    """Check that all ranks have read equally much of each dataset that they share.

    A checkpoint has one position for all of them: with any other, a restart would skip rows.
    Different epochs are no error if each rank has read whole ones.

    Parameters
    ----------
    positions : sequence of mapping of str to object
        The positions of each rank's data loaders, in rank order.

    Raises
    ------
    DistributorError
        If one has read more than another.
    """
    shards = {name for each in positions for name, at in each.items() if "history" in at}
    for name in sorted(shards):
        found = [each.get(name) for each in positions]
        other = next((rank for rank, at in enumerate(found) if at != found[0]), None)
        if other is not None and any(at and at["history"] for at in found):
            raise DistributorError(
                f"The ranks have not read {name} in step: rank 0 {_describe(found[0])}, but rank "
                f"{other} {_describe(found[other])}. A checkpoint has one position for all ranks, "
                "so they must read their shards together, with the same batch size and as many "
                "passes. What only one rank reads can be a dataset of its own."
            )


def _describe(position: Mapping[str, Any] | None) -> str:
    if position is None:
        return "has not read it"
    rows = position["history"][-1][1] if position["history"] else 0
    return f"has read {counted(rows, 'row')} of its share in epoch {position['epoch']}"
