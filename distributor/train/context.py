"""The rank of this process, as Ray Train's ``get_context`` describes it."""

from __future__ import annotations

import os
from typing import Any

from distributor import runtime
from distributor.core.checkpoint_config import CheckpointSettings
from distributor.train.runtime.session import session
from distributor.train.storage.checkpoint_store import Storage

_NO_TRIAL = (
    "Trials belong to Ray Tune, and are deprecated in Ray Train too: use get_experiment_name() for "
    "the name of the run, and get_storage() for its folder."
)
_NO_METADATA = (
    "get_metadata() is deprecated in Ray Train too: pass the metadata in train_loop_config, or add "
    "it to the checkpoints with Checkpoint.set_metadata."
)


class TrainContext:
    """The rank of this process, and the run that it belongs to.

    In a process that is not a rank, it describes the only rank of a world of size 1.

    Follows ``ray.train.TrainContext``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.TrainContext.html

    Examples
    --------
    >>> context = get_context()
    >>> context.get_world_rank(), context.get_world_size()
    (0, 1)
    """

    def get_world_rank(self) -> int:
        """Return this rank's number among all ranks."""
        return runtime.get_global_rank()

    def get_world_size(self) -> int:
        """Return the number of ranks."""
        return runtime.get_world_size()

    def get_local_rank(self) -> int:
        """Return this rank's number on its node."""
        return runtime.get_local_rank()

    def get_local_world_size(self) -> int:
        """Return the number of ranks on this node."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def get_node_rank(self) -> int:
        """Return the number of this rank's node."""
        return runtime.get_node_rank()

    def get_experiment_name(self) -> str:
        """Return the name of the training run; the run's id if it has none."""
        settings = CheckpointSettings.from_env()
        return settings.name if settings else os.environ.get("TORCHELASTIC_RUN_ID", "")

    def get_storage(self) -> Storage:
        """Return the run's folder in storage, with attributes ``path`` and ``filesystem``.

        Raises
        ------
        RuntimeError
            If this process is not a rank of a run, or the run has no storage.
        DistributorError
            At the first use in a rank, if the ranks do not share the storage.
        """
        return session.reporter.storage

    def get_trial_name(self) -> str:
        """Raise DeprecationWarning: a run is no trial of Ray Tune."""
        raise DeprecationWarning(_NO_TRIAL)

    def get_trial_id(self) -> str:
        """Raise DeprecationWarning: a run is no trial of Ray Tune."""
        raise DeprecationWarning(_NO_TRIAL)

    def get_trial_dir(self) -> str:
        """Raise DeprecationWarning: a run is no trial of Ray Tune."""
        raise DeprecationWarning(_NO_TRIAL)

    def get_trial_resources(self) -> Any:
        """Raise DeprecationWarning: a run is no trial of Ray Tune."""
        raise DeprecationWarning(_NO_TRIAL)

    def get_metadata(self) -> dict[str, Any]:
        """Raise DeprecationWarning: pass metadata to the training function."""
        raise DeprecationWarning(_NO_METADATA)


def get_context() -> TrainContext:
    """Return the rank of this process.

    Follows ``ray.train.get_context``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.get_context.html

    Returns
    -------
    TrainContext
        The context. It can be used in any process.

    Examples
    --------
    >>> get_context().get_local_rank()
    0
    """
    return TrainContext()
