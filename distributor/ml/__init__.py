"""The stages of ``pyspark.ml`` that train a module of torch and predict with it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from distributor.core.versions import require_spark

if TYPE_CHECKING:
    from distributor.ml.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]


def __getattr__(name: str) -> Any:
    # The module is imported on first use: ranks import others of this package, without pyspark.ml.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_spark()
    return getattr(import_module("distributor.ml.estimator"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
