"""The result of a training run."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from distributor.train.checkpoint import Checkpoint
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.filesystems import resolve
from distributor.train.storage.report_log import Report, recorded

if TYPE_CHECKING:
    import pandas
    import pyarrow.fs as pafs


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a training, in Ray Train's names.

    Parameters
    ----------
    metrics : dict of str to object or None
        What rank 0 reported last.
    checkpoint : Checkpoint or None
        The latest that exists.
    error : Exception or None
        None: what fails is raised.
    path : str
        The training's folder.
    filesystem : pyarrow.fs.FileSystem
        Where that is.
    best_checkpoints : list of pairs of Checkpoint and dict
        All that are kept, with what was reported with each, the oldest first.
    return_value : object
        What rank 0's function returned.
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
        """Read what a training has reported and kept, of one that failed or goes on too.

        Parameters
        ----------
        path : str or path
            Its folder.
        storage_filesystem : pyarrow.fs.FileSystem or fsspec file system, optional
            Where that is; by default the path says so.
        return_value : object, optional
            What it returned, which is not kept.
        """
        filesystem, inside = resolve(path, storage_filesystem)
        storage = Storage.at(filesystem, inside)
        reports = recorded(storage)
        kept = [
            (storage.checkpoint(name), dict(manifest.metrics))
            for name, manifest in storage.committed()
        ]
        return cls(
            metrics=dict(reports[-1].metrics) if reports else None,
            checkpoint=kept[-1][0] if kept else None,
            error=None,
            path=inside,
            filesystem=filesystem,
            best_checkpoints=kept,
            return_value=return_value,
            reports=reports,
        )

    @property
    def metrics_dataframe(self) -> pandas.DataFrame:
        """Give all that was reported, a row each."""
        import pandas

        return pandas.DataFrame([dict(report.metrics) for report in self.reports])

    def get_best_checkpoint(
        self, metric: str, mode: Literal["max", "min"] = "max"
    ) -> Checkpoint | None:
        """Give the kept checkpoint with the best value of a metric; None where none has it."""
        having = [pair for pair in self.best_checkpoints if metric in pair[1]]
        if not having:
            return None
        best = max if mode == "max" else min
        return best(having, key=lambda pair: pair[1][metric])[0]
