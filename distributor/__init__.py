"""Run PyTorch on Spark: one function or script on N ranks, here or as a barrier job."""

from distributor.errors import (
    DistributorError,
    ExecutorNotReady,
    RemoteError,
    RunTimeout,
    StartTimeout,
    UnpicklableError,
    WorkerDied,
)
from distributor.torch_distributor import TorchDistributor
from distributor.version import __version__

__all__ = [
    "DistributorError",
    "ExecutorNotReady",
    "RemoteError",
    "RunTimeout",
    "StartTimeout",
    "TorchDistributor",
    "UnpicklableError",
    "WorkerDied",
    "__version__",
]
