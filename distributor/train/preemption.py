"""Notices that the run is about to lose a process, so that ranks can save a checkpoint."""

from __future__ import annotations

from distributor.train.errors import PreemptionInfo
from distributor.train.runtime.session import session


def is_preempted() -> bool:
    """Return whether this run is about to lose a process, so that it can save a checkpoint.

    Returns True once for each notice, at the same call in all ranks. A notice comes when Spark
    begins to decommission an executor on a host of the ranks, when a rank receives SIGTERM, or when
    the driver receives SIGTERM while ``run`` waits on its main thread; the driver then ends after
    the next checkpoint that is reported. Report a checkpoint when this returns True, and continue.

    Every rank must call this equally often, usually once per step. Until a notice comes, a call
    costs next to nothing. A rank that calls it on its main thread survives its first SIGTERM,
    unless the program handles SIGTERM itself. No storage is needed. Nodes without a network link to
    the driver receive no notices, and Spark Connect does not report decommissioning.

    Follows no API of Ray Train, which has no equivalent.

    Returns
    -------
    bool
        Whether a notice is due at this call; False in a process that is not a rank.

    Examples
    --------
    >>> for step in range(3):
    ...     if is_preempted() or step % 100 == 99:
    ...         ...  # save, and report
    """
    return session.is_preempted()


def get_preemption_info() -> PreemptionInfo | None:
    """Return which ranks are about to be preempted, from the same call on in all ranks.

    The same notices as those of `is_preempted`, and they come under the same conditions. Every
    rank must call this equally often; calls of the two functions are counted separately.

    Follows ``ray.train.get_preemption_info``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.get_preemption_info.html

    Returns
    -------
    PreemptionInfo or None
        The hosts of all notices so far, and their ranks; None before the first notice. The deadline
        is not known.

    Raises
    ------
    RuntimeError
        If this process is not a rank of a run.

    Examples
    --------
    >>> def train_func():
    ...     for step in range(1000):
    ...         info = get_preemption_info()
    ...         if info is not None:
    ...             ...  # save, report, and return
    """
    ranks = session.preempted_ranks()
    return None if ranks is None else PreemptionInfo(None, ranks)
