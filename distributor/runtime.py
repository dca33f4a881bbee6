"""Who this rank is: for code that runs on ranks, and in a plain call elsewhere.

The names are those of ``serverless_gpu.runtime``.
"""

from __future__ import annotations

import os


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
