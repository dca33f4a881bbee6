"""How a training run ended: its result, or the error of `TorchTrainer.fit`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import pyarrow.fs as pafs

from distributor.core.text import table_of
from distributor.errors import DistributorError, NodeLost
from distributor.filesystems import resolve
from distributor.serialization.outcome import Failure
from distributor.train.config import check_order
from distributor.train.storage.checkpoint import Checkpoint
from distributor.train.storage.checkpoint_manager import Report, best_of, read_reports, score_of
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.files import Manifest

if TYPE_CHECKING:
    import pandas


@dataclass
class Result:
    """The reports, checkpoints and return value of a training run.

    Follows ``ray.train.Result``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.Result.html

    Parameters
    ----------
    metrics : dict of str to object or None
        The metrics that rank 0 reported last; None if it reported none.
    checkpoint : Checkpoint or None
        The latest checkpoint that exists.
    error : Exception or None
        Always None: `TorchTrainer.fit` raises the error of a run that fails.
    path : str or None
        The run's folder, which exists if the run has stored something; None if the training
        function ran in the process of ``fit``.
    metrics_dataframe : pandas.DataFrame, optional
        The metrics of `best_checkpoints`, one row each; None if there are none, or pandas is not
        installed.
    best_checkpoints : list of pairs of Checkpoint and dict, optional
        The best checkpoints, at most ``num_to_keep``, with their metrics: the best last, or the
        latest last if no metric ranks them.
    return_value : object, optional
        The value that rank 0's training function returned.
    reports : list of Report
        All reports, in order.

    Attributes
    ----------
    filesystem : pyarrow.fs.FileSystem
        The file system of `path`.

    Examples
    --------
    >>> result = trainer.fit()
    >>> result.metrics["loss"], result.checkpoint.path
    (0.25, '/home/me/distributor_results/mnist/checkpoint_000004')
    """

    metrics: dict[str, Any] | None
    checkpoint: Checkpoint | None
    error: Exception | None
    path: str | None
    metrics_dataframe: pandas.DataFrame | None = None
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] | None = None
    _storage_filesystem: pafs.FileSystem | None = field(default=None, repr=False)
    return_value: Any = None
    _: KW_ONLY
    reports: list[Report] = field(default_factory=list, repr=False)

    def _repr_html_(self) -> str:
        rows: dict[str, object] = {
            **(self.metrics or {}),
            "checkpoint": self.checkpoint.path if self.checkpoint else "none",
            "path": self.path or "none",
            "reports": len(self.reports),
        }
        if self.return_value is not None:
            rows["return value"] = self.return_value
        return table_of("Result", rows)

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], storage_filesystem: Any = None) -> Result:
        """Read the reports and checkpoints of a run, which may have failed or be running.

        Parameters
        ----------
        path : str or path
            The run's folder, or its address.
        storage_filesystem : pyarrow.fs.FileSystem or fsspec file system, optional
            The file system of `path`; by default the one that the path names.

        Returns
        -------
        Result
            The result, without a return value.

        Raises
        ------
        RuntimeError
            If there is no such folder, or it has neither reports nor checkpoints.
        TypeError
            If `storage_filesystem` is not a file system of pyarrow or fsspec.
        ValueError
            If no file system is known for the address.

        Examples
        --------
        >>> result = Result.from_path("s3://bucket/runs/mnist")
        """
        filesystem, inside = resolve(path, storage_filesystem)
        found = cls.from_storage(Storage.at(filesystem, inside))
        if not found.reports and not found.checkpoint:
            raise RuntimeError(
                f"There is no training run in {inside}: it has neither checkpoints nor a log of "
                "reports."
            )
        return found

    @classmethod
    def from_storage(cls, storage: Storage, return_value: Any = None) -> Result:
        """Read what a run has stored, perhaps nothing.

        Parameters
        ----------
        storage : Storage
            The run's folder.
        return_value : object, optional
            The value for `Result.return_value`, which is not in storage.

        Returns
        -------
        Result
            The result.
        """
        reports = read_reports(storage)
        committed = storage.committed()
        best = [
            (storage.checkpoint(name), dict(manifest.metrics))
            for name, manifest in best_of(committed)
        ]
        return cls(
            metrics=_latest_metrics(reports, committed),
            checkpoint=storage.checkpoint(committed[-1][0]) if committed else None,
            error=None,
            path=storage.path,
            metrics_dataframe=_dataframe([metrics for _, metrics in best]) if best else None,
            best_checkpoints=best,
            _storage_filesystem=storage.filesystem,
            return_value=return_value,
            reports=reports,
        )

    @property
    def filesystem(self) -> pafs.FileSystem:
        """The file system of `path`."""
        return self._storage_filesystem or pafs.LocalFileSystem()

    @property
    def config(self) -> NoReturn:
        """Raise DeprecationWarning, as in Ray Train: it belongs to Ray Tune."""
        raise DeprecationWarning(
            "Result.config belongs to Ray Tune: the configuration of the training function is "
            "TorchTrainer.train_loop_config."
        )

    def get_best_checkpoint(self, metric: str, mode: Literal["max", "min"]) -> Checkpoint | None:
        """Return the checkpoint with the best value of a metric, among `best_checkpoints`.

        Parameters
        ----------
        metric : str
            The metric, or a path such as ``"val/loss"`` of one in a nested dict.
        mode : "max" or "min"
            Whether a high or a low value is better.

        Returns
        -------
        Checkpoint
            The checkpoint; the first of those with the same value.

        Raises
        ------
        RuntimeError
            If there are no checkpoints, or none was reported with such a number.
        ValueError
            If `mode` is neither "max" nor "min".
        """
        if not self.best_checkpoints:
            raise RuntimeError("The run has no checkpoint.")
        check_order("mode", mode)
        scores = {
            index: score
            for index, (_, metrics) in enumerate(self.best_checkpoints)
            if (score := score_of(metrics, metric)) is not None
        }
        if not scores:
            raise RuntimeError(
                f"No checkpoint was reported with a number {metric!r}; the latest metrics are "
                f"{self.metrics}."
            )
        best = max if mode == "max" else min
        return self.best_checkpoints[best(scores, key=scores.__getitem__)][0]


def _latest_metrics(
    reports: Sequence[Report], committed: Sequence[tuple[str, Manifest]]
) -> dict[str, Any] | None:
    """Return the metrics of the latest report, with those of its checkpoint's validation."""
    if not reports:
        return None
    manifest = dict(committed).get(reports[-1].checkpoint or "")
    return dict(manifest.metrics if manifest else reports[-1].metrics)


def _dataframe(rows: list[dict[str, Any]]) -> pandas.DataFrame | None:
    try:
        import pandas
    except ImportError:  # no reason to fail after the training
        return None
    return pandas.DataFrame(rows)


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
    kept = vars(error).keys() & {"rank_failures", "attempts", "__notes__"}
    vars(found).update({name: copy(vars(error)[name]) for name in kept})
    return found
