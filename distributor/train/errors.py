"""The errors that `TorchTrainer.fit` raises, under Ray Train's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distributor.errors import DistributorError, NodeLost
from distributor.serialization.outcome import Failure, add_note


class TrainingFailedError(DistributorError):
    """A training run failed. Its cause is the exception that `TorchDistributor.run` raises.

    Follows ``ray.train.TrainingFailedError``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.TrainingFailedError.html

    Examples
    --------
    >>> try:  # doctest: +SKIP
    ...     trainer.fit()
    ... except TrainingFailedError as error:
    ...     print(error.__cause__)
    """


class WorkerGroupError(TrainingFailedError):
    """One or more ranks failed.

    Follows ``ray.train.WorkerGroupError``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.WorkerGroupError.html

    Parameters
    ----------
    error_message : str
        What happened.
    worker_failures : mapping of int to Exception
        The exceptions of the ranks, the cause first.

    Examples
    --------
    >>> error = WorkerGroupError("Rank 1: KeyError: 'x'", {1: KeyError("x")})
    >>> error.worker_failures
    {1: KeyError('x')}
    """

    def __init__(self, error_message: str, worker_failures: Mapping[int, BaseException]) -> None:
        super().__init__(f"Training failed due to worker errors:\n{error_message}")
        self._error_message = error_message
        self.worker_failures = dict(worker_failures)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._error_message, self.worker_failures)


class ControllerError(TrainingFailedError):
    """A run failed for another reason than its ranks: it did not start, or a callback failed.

    Follows ``ray.train.ControllerError``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.ControllerError.html

    Parameters
    ----------
    controller_failure : Exception
        The error.

    Examples
    --------
    >>> ControllerError(TimeoutError("no slots")).controller_failure
    TimeoutError('no slots')
    """

    def __init__(self, controller_failure: Exception) -> None:
        super().__init__(f"Training failed due to controller error:\n{controller_failure}")
        self.controller_failure = controller_failure

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.controller_failure,)


@dataclass(frozen=True)
class PreemptionInfo:
    """Which ranks are about to be preempted.

    Follows ``ray.train.PreemptionInfo``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.PreemptionInfo.html

    Parameters
    ----------
    deadline_ms : int or None
        When, in milliseconds since the epoch; None if it is not known.
    preempted_node_to_ranks : mapping of str to list of int
        The ranks on each host.

    Examples
    --------
    >>> PreemptionInfo(None, {"b": [2, 3], "a": [0]}).preempted_ranks
    [0, 2, 3]
    """

    deadline_ms: int | None
    preempted_node_to_ranks: Mapping[str, list[int]]

    @property
    def preempted_node_ids(self) -> list[str]:
        """The hosts, sorted."""
        return sorted(self.preempted_node_to_ranks)

    @property
    def preempted_ranks(self) -> list[int]:
        """The ranks, sorted."""
        return sorted({rank for ranks in self.preempted_node_to_ranks.values() for rank in ranks})


class PreemptionError(TrainingFailedError):
    """A run ended because a host of its ranks was preempted.

    Follows ``ray.train.PreemptionError``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.PreemptionError.html

    Parameters
    ----------
    preemption_info : PreemptionInfo
        The ranks that were preempted.
    drain_timed_out : bool, default False
        Whether ranks were still running at the deadline.

    Examples
    --------
    >>> PreemptionError(PreemptionInfo(None, {"a": [0]})).preemption_info.preempted_ranks
    [0]
    """

    def __init__(self, preemption_info: PreemptionInfo, drain_timed_out: bool = False) -> None:
        super().__init__(
            "Training was interrupted by node preemption (preempted_ranks="
            f"{preemption_info.preempted_ranks}, drain_timed_out={drain_timed_out})."
        )
        self.preemption_info = preemption_info
        self.drain_timed_out = drain_timed_out

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.preemption_info, self.drain_timed_out)


def training_error(error: Exception) -> TrainingFailedError:
    """Return Ray Train's error for one that `TorchDistributor.run` has raised."""
    failures: Mapping[int, Failure] = getattr(error, "rank_failures", {})
    preempted: Mapping[str, list[int]] = getattr(error, "preempted", {})
    found: TrainingFailedError
    if preempted:
        found = PreemptionError(PreemptionInfo(None, preempted))
    elif failures:
        cause, *others = failures
        exceptions = {cause: error, **{rank: failures[rank].exception() for rank in others}}
        summaries = [f"Rank {rank}: {failure.summary}" for rank, failure in failures.items()]
        found = WorkerGroupError("\n".join(summaries), exceptions)
    elif isinstance(error, NodeLost):
        found = WorkerGroupError(str(error), {0: error})
    else:
        found = ControllerError(error)
    for name in ("rank_failures", "attempts"):
        if name in vars(error):
            setattr(found, name, vars(error)[name])
    for note in getattr(error, "__notes__", []):
        add_note(found, note)
    return found
