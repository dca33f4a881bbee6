"""Run a PyTorch function or script on many ranks, on this machine or on a Spark cluster."""

from distributor import runtime
from distributor.control.future import RunFuture
from distributor.control.stack_requests import stacks
from distributor.deepspeed_distributor import DeepspeedTorchDistributor
from distributor.diagnosis import doctor
from distributor.errors import (
    ApplicationEnded,
    DistributorError,
    ExecutorNotReady,
    NodeLost,
    RemoteError,
    RunCancelled,
    RunStalled,
    RunTimeout,
    StartTimeout,
    UnpicklableError,
    ValueTooLarge,
    WorkerDied,
)
from distributor.launchers.local import cool_down
from distributor.prepared_run import warm_up
from distributor.rank.messages import Progress, Reported
from distributor.serialization.outcome import load_value
from distributor.serverless import distributed
from distributor.settings.listener import Listener
from distributor.torch_distributor import TorchDistributor
from distributor.version import __version__

__all__ = [
    "ApplicationEnded",
    "DeepspeedTorchDistributor",
    "DistributorError",
    "ExecutorNotReady",
    "Listener",
    "NodeLost",
    "Progress",
    "RemoteError",
    "Reported",
    "RunCancelled",
    "RunFuture",
    "RunStalled",
    "RunTimeout",
    "StartTimeout",
    "TorchDistributor",
    "UnpicklableError",
    "ValueTooLarge",
    "WorkerDied",
    "__version__",
    "cool_down",
    "distributed",
    "doctor",
    "load_value",
    "runtime",
    "stacks",
    "warm_up",
]
