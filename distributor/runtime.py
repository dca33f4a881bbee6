"""Who this rank is, for code that runs on ranks, and in a plain call elsewhere.

The names are those of ``serverless_gpu.runtime``.
"""

from __future__ import annotations

import os
from typing import Any

from distributor.node.worker.telemetry import tell


def get_global_rank() -> int:
    """Give this rank's number among all; 0 outside a run."""
    return int(os.environ.get("RANK", "0"))


def get_local_rank() -> int:
    """Give this rank's number on its node; 0 outside a run."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_node_rank() -> int:
    """Give the number of this rank's node; 0 outside a run."""
    return int(os.environ.get("GROUP_RANK", "0"))


def get_world_size() -> int:
    """Give the number of ranks; 1 outside a run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def progress(done: Any, total: Any = None, /, **metrics: Any) -> None:
    """Tell how far this rank is: rank 0's word is the run's live line, metrics go to MLflow.

    It costs the training loop a few microseconds. Metrics are sent in batches from the driver,
    with `done` as their step. Outside a run nothing happens.

    Parameters
    ----------
    done : int or float
        How much is done, in whatever unit: steps, samples, epochs.
    total : int or float, optional
        How much there is to do.
    **metrics : int, float, tensor or numpy number
        What was measured. A tensor on a GPU is waited for.

    Raises
    ------
    TypeError
        For what is no number.

    Examples
    --------
    >>> for step in range(1000):
    ...     progress(step + 1, 1000, loss=0.1)
    """
    tell(done, total, metrics)
