"""The positions of data loaders that checkpoints contain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributor.core.checkpoint_config import CheckpointSettings
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
