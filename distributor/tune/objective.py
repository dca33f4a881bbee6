"""The values of a trial: those that its ranks report, or the one that rank 0 returns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.trial import Trial

from distributor.core.rank_variables import CheckpointSettings
from distributor.core.text import listed
from distributor.torch_distributor import TorchDistributor


@dataclass(frozen=True)
class Objective:
    """How the values of a trial are found.

    Parameters
    ----------
    keys : tuple of str
        The metrics, one for each direction of the study. Without any it is what rank 0 returns.
    reduce : "last", "min" or "max"
        Which of the reported values counts.
    count : int
        The number of the study's directions.
    """

    keys: tuple[str, ...]
    reduce: str
    count: int

    @classmethod
    def of(cls, study: optuna.Study, metric: Any, reduce: Any) -> Objective:
        """Return the objective for arguments of ``optimize``, which are checked."""
        keys = (metric,) if isinstance(metric, str) else tuple(metric or ())
        count = len(study.directions)
        if not all(isinstance(key, str) for key in keys):
            raise TypeError(f"metric must be a key of train.report, or several, but is {metric!r}.")
        if keys and len(keys) != count:
            raise ValueError(
                f"metric has {len(keys)} of the {count} keys that the study needs, one for each of "
                f"its directions: {metric!r}."
            )
        if reduce not in ("last", "min", "max"):
            raise ValueError(f"reduce must be 'last', 'min' or 'max', but is {reduce!r}.")
        if _prunes(study):
            pruner = type(study.pruner).__name__
            if count > 1:
                raise ValueError(
                    f"The study has {count} directions, for which Optuna does not prune: it cannot "
                    f"have a {pruner}."
                )
            if not keys:
                raise ValueError(
                    f"The study has a {pruner}, which needs what trials report: pass metric, a key "
                    "of train.report. (Or make the study with optuna.pruners.NopPruner().)"
                )
        return cls(keys, reduce, count)

    def check_storage(self, distributor: TorchDistributor) -> None:
        """Check that ranks can report."""
        stored = distributor.storage_path or CheckpointSettings.from_env(distributor.env)
        if self.keys and not stored:
            raise ValueError(
                f"metric is {self.keys[0]!r}, a key of train.report, which needs storage: pass a "
                f"{distributor.spelling.of('storage_path')} to the distributor."
            )

    def values_in(self, metrics: Mapping[str, Any]) -> tuple[float, ...] | None:
        """Return the values in a report; None if one is missing."""
        from distributor.train.storage.checkpoint_manager import metric_in  # it needs pyarrow

        values = [metric_in(metrics, key) for key in self.keys]
        if not values or any(type(value) not in (int, float) for value in values):
            return None
        return tuple(values)

    def result(
        self, trial: Trial, reports: Mapping[int, tuple[float, ...]], value: Any
    ) -> Sequence[float]:
        """Return the values of a trial that has ended, by what was reported and returned."""
        if self.keys:
            if not reports:
                raise ValueError(
                    f"Trial {trial.number} has not reported {listed('metric', self.keys)} as a "
                    "number, as train.report({...}) does in each rank."
                )
            series = list(zip(*(reports[step] for step in sorted(reports)), strict=True))
            return [self._reduced(values) for values in series]
        values = value if self.count > 1 and isinstance(value, (list, tuple)) else [value]
        try:
            found = [float(each) for each in values]
        except (TypeError, ValueError):
            found = []
        if len(found) != self.count:
            wanted = "a number" if self.count == 1 else f"{self.count} numbers"
            raise TypeError(
                f"Rank 0 of trial {trial.number} has returned {value!r}, but {wanted} is wanted. "
                "(Or pass metric, a key of train.report.)"
            )
        return found

    def _reduced(self, values: Sequence[float]) -> float:
        if self.reduce == "last":
            return values[-1]
        numbers = [value for value in values if not math.isnan(value)] or values
        return min(numbers) if self.reduce == "min" else max(numbers)


def _prunes(study: optuna.Study) -> bool:
    """Return whether the user has chosen a pruner: each study has a MedianPruner by default."""
    default, pruner = optuna.pruners.MedianPruner(), study.pruner
    is_default = type(pruner) is type(default) and vars(pruner) == vars(default)
    return not (is_default or isinstance(pruner, optuna.pruners.NopPruner))
