"""The result of a training run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from distributor.train.checkpoint import Checkpoint
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.filesystems import resolve
from distributor.train.storage.manifest import Manifest
from distributor.train.storage.report_log import Report, read_reports

if TYPE_CHECKING:
    import pandas
    import pyarrow.fs as pafs


@dataclass(frozen=True, kw_only=True)
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
    path : str
        The run's folder.
    filesystem : pyarrow.fs.FileSystem
        The file system of that folder.
    best_checkpoints : list of pairs of Checkpoint and dict
        All checkpoints that are kept, with the metrics of their reports, the oldest first.
    return_value : object, default None
        The value that rank 0's training function returned.
    reports : list of Report
        All reports, in order.

    Examples
    --------
    >>> result = trainer.fit()
    >>> result.metrics["loss"], result.checkpoint.path
    (0.25, '/home/me/distributor_results/mnist/checkpoint_000004')
    """

    metrics: dict[str, Any] | None
    checkpoint: Checkpoint | None
    error: Exception | None
    path: str
    filesystem: pafs.FileSystem
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]]
    return_value: Any = None
    reports: list[Report] = field(default_factory=list, repr=False)

    @classmethod
    def from_path(
        cls,
        path: str | os.PathLike[str],
        storage_filesystem: Any = None,
        *,
        return_value: Any = None,
    ) -> Result:
        """Read the reports and checkpoints of a run, which may have failed or be running.

        Parameters
        ----------
        path : str or path
            The run's folder, or its address.
        storage_filesystem : pyarrow.fs.FileSystem or fsspec file system, optional
            The file system of `path`; by default the one that the path names.
        return_value : object, optional
            The value for `Result.return_value`, which is not in storage.

        Raises
        ------
        TypeError
            If `storage_filesystem` is not a file system of pyarrow or fsspec.
        ValueError
            If no file system is known for the address.

        Examples
        --------
        >>> result = Result.from_path("s3://bucket/runs/mnist")
        """
        filesystem, inside = resolve(path, storage_filesystem)
        storage = Storage.at(filesystem, inside)
        reports = read_reports(storage)
        committed = storage.committed()
        checkpoints = [
            (storage.checkpoint(name), dict(manifest.metrics)) for name, manifest in committed
        ]
        return cls(
            metrics=_latest_metrics(reports, committed),
            checkpoint=checkpoints[-1][0] if checkpoints else None,
            error=None,
            path=inside,
            filesystem=filesystem,
            best_checkpoints=checkpoints,
            return_value=return_value,
            reports=reports,
        )

    @property
    def metrics_dataframe(self) -> pandas.DataFrame:
        """The metrics of all reports, one row each; needs pandas."""
        import pandas

        return pandas.DataFrame([dict(report.metrics) for report in self.reports])

    def get_best_checkpoint(
        self, metric: str, mode: Literal["max", "min"] = "max"
    ) -> Checkpoint | None:
        """Return the checkpoint with the best value of a metric, among those that are kept.

        Parameters
        ----------
        metric : str
            The metric.
        mode : "max" or "min", default "max"
            Whether a high or a low value is better.

        Returns
        -------
        Checkpoint or None
            The checkpoint; None if none was reported with the metric.
        """
        candidates = [pair for pair in self.best_checkpoints if metric in pair[1]]
        if not candidates:
            return None
        best = max if mode == "max" else min
        return best(candidates, key=lambda pair: pair[1][metric])[0]


def _latest_metrics(
    reports: Sequence[Report], committed: Sequence[tuple[str, Manifest]]
) -> dict[str, Any] | None:
    """Return the metrics of the latest report, with those of its checkpoint's validation."""
    if not reports:
        return None
    manifest = dict(committed).get(reports[-1].checkpoint or "")
    return dict(manifest.metrics if manifest else reports[-1].metrics)
