"""Who a rank is, in Ray Train's names."""

from __future__ import annotations

import os

from distributor import runtime
from distributor.core.checkpoint_config import CheckpointSettings
from distributor.train.runtime.reporter import current
from distributor.train.storage.checkpoint_store import Storage


class TrainContext:
    """Who this rank is; right in any rank, and that of a world of one elsewhere."""

    def get_world_rank(self) -> int:
        """Give this rank's number among all."""
        return runtime.get_global_rank()

    def get_world_size(self) -> int:
        """Give the number of ranks."""
        return runtime.get_world_size()

    def get_local_rank(self) -> int:
        """Give this rank's number on its node."""
        return runtime.get_local_rank()

    def get_local_world_size(self) -> int:
        """Give the number of ranks on this node."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def get_node_rank(self) -> int:
        """Give the number of this rank's node."""
        return runtime.get_node_rank()

    def get_experiment_name(self) -> str:
        """Give the training's name; the run's where nobody named it."""
        checkpoint_settings = CheckpointSettings.here()
        return (
            checkpoint_settings.name
            if checkpoint_settings
            else os.environ.get("TORCHELASTIC_RUN_ID", "")
        )

    def get_storage(self) -> Storage:
        """Give where the training is kept: its ``path`` and ``filesystem``."""
        return current().storage


def get_context() -> TrainContext:
    """Tell who this rank is."""
    return TrainContext()
