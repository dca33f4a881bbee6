"""The identity of this rank, and its progress, for code that runs on ranks.

The functions have the names of ``serverless_gpu.runtime``. Outside a run they behave as on the only
rank of a run.
"""

from __future__ import annotations

import os
from typing import Any

from distributor.rank.context import worker_context
from distributor.rank.messages import checked


def get_global_rank(group: Any = None) -> int:
    """Return this rank's number among all ranks, or in a process group; 0 outside a run.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        A process group of this rank. By default all ranks count.

    Returns
    -------
    int
        From 0 to ``get_world_size() - 1``: torchrun's ``RANK``. With a group it is
        ``torch.distributed.get_rank(group)``, which is -1 if this rank is not in the group.

    Raises
    ------
    ValueError
        If a group is given and no process group has been initialized.
    """
    if group is None:
        return int(os.environ.get("RANK", "0"))
    import torch.distributed as dist

    return int(dist.get_rank(group))


def get_local_rank() -> int:
    """Return this rank's number among the ranks of its node; 0 outside a run.

    Returns
    -------
    int
        torchrun's ``LOCAL_RANK``.
    """
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_local_world_size() -> int:
    """Return the number of ranks of this rank's node; 1 outside a run.

    Returns
    -------
    int
        torchrun's ``LOCAL_WORLD_SIZE``.
    """
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def get_node_ip() -> str:
    """Return the IP address of this rank's node, or outside a run of this machine.

    Returns
    -------
    str
        The address from which the node sends to rank 0's node, or outside a run to other networks;
        "127.0.0.1" if there is no network.
    """
    from distributor.node.agent.network import source_address

    try:
        return source_address(os.environ.get("MASTER_ADDR", "192.0.2.1"))
    except OSError:
        return "127.0.0.1"


def get_node_rank() -> int:
    """Return the number of this rank's node; 0 outside a run.

    Returns
    -------
    int
        torchrun's ``GROUP_RANK``.
    """
    return int(os.environ.get("GROUP_RANK", "0"))


def get_replica_rank() -> int:
    """Return the number of this rank's replica of the run: always 0, because a run has one.

    Returns
    -------
    int
        0.
    """
    return 0


def get_world_size() -> int:
    """Return the number of ranks; 1 outside a run.

    Returns
    -------
    int
        torchrun's ``WORLD_SIZE``.
    """
    return int(os.environ.get("WORLD_SIZE", "1"))


def progress(done: Any, total: Any = None, /, **metrics: Any) -> None:
    """Report the progress of this rank, and metrics.

    Rank 0's progress is the live line of the run on the driver. Metrics go to the job's MLflow run,
    if there is one: those of rank 0, or of all ranks with ``mlflow_ranks="all"``. The driver sends
    them in batches, with `done` as their step. A call costs the training loop a few microseconds.
    Outside a run it only checks its arguments.

    Parameters
    ----------
    done : int or float
        How much is done, in any unit: steps, samples, epochs.
    total : int or float, optional
        How much there is to do, in the same unit; unknown by default.
    **metrics : int, float, tensor or numpy number
        Measured values, by name. For a tensor on a GPU the call waits until it is computed.

    Raises
    ------
    TypeError
        If an argument is not a number.

    Examples
    --------
    >>> for step in range(1000):
    ...     progress(step + 1, 1000, loss=0.1)
    """
    worker_context().send(checked(done, total, metrics))
