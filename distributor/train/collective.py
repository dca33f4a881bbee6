"""Small collectives of the ranks of a run, under the names of ``ray.train.collective``.

They need no process group of torch, and can be called on any thread; with ``recovery="in_place"``,
only on that of the optimizer's steps. Every rank must make the same calls in the same order.
"""

from __future__ import annotations

from typing import TypeVar

from distributor.train.runtime.session import session

__all__ = ["barrier", "broadcast_from_rank_zero"]

T = TypeVar("T")


def barrier() -> None:
    """Wait until every rank has called this.

    Follows ``ray.train.collective.barrier``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.collective.barrier.html

    Raises
    ------
    RuntimeError
        If this process is not a rank of a run.
    DistributorError
        If a rank does not call this within 30 minutes; names the ranks.
    ConnectionError
        If rank 0 has ended.

    Examples
    --------
    >>> def train_func():
    ...     if get_context().get_world_rank() == 0:
    ...         download()
    ...     barrier()
    """
    session.collectives.barrier()


def broadcast_from_rank_zero(data: T) -> T:
    """Return the object of rank 0, once every rank has called this.

    Follows ``ray.train.collective.broadcast_from_rank_zero``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.collective.broadcast_from_rank_zero.html

    Parameters
    ----------
    data : object
        An object that can be pickled, of at most 64 MB. Only that of rank 0 is used. Tensors belong
        in ``torch.distributed.broadcast``, which is faster.

    Returns
    -------
    object
        A copy of rank 0's object.

    Raises
    ------
    RuntimeError
        If this process is not a rank of a run.
    ValueError
        If the object of rank 0 is too large; on all ranks.
    DistributorError
        If a rank does not call this within 30 minutes; names the ranks.
    ConnectionError
        If rank 0 has ended.

    Examples
    --------
    >>> def train_func():
    ...     run_name = broadcast_from_rank_zero(make_name())
    """
    received: T = session.collectives.broadcast(data)
    return received
