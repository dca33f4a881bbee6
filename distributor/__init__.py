"""Run a PyTorch function or script on many ranks, on this machine or on a Spark cluster."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from distributor import runtime

if TYPE_CHECKING:
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

_MODULES = {
    "ApplicationEnded": "distributor.errors",
    "DeepspeedTorchDistributor": "distributor.deepspeed_distributor",
    "DistributorError": "distributor.errors",
    "ExecutorNotReady": "distributor.errors",
    "Listener": "distributor.settings.listener",
    "NodeLost": "distributor.errors",
    "Progress": "distributor.rank.messages",
    "RemoteError": "distributor.errors",
    "Reported": "distributor.rank.messages",
    "RunCancelled": "distributor.errors",
    "RunFuture": "distributor.control.future",
    "RunStalled": "distributor.errors",
    "RunTimeout": "distributor.errors",
    "StartTimeout": "distributor.errors",
    "TorchDistributor": "distributor.torch_distributor",
    "UnpicklableError": "distributor.errors",
    "ValueTooLarge": "distributor.errors",
    "WorkerDied": "distributor.errors",
    "__version__": "distributor.version",
    "cool_down": "distributor.launchers.local",
    "distributed": "distributor.serverless",
    "doctor": "distributor.diagnosis",
    "load_value": "distributor.serialization.outcome",
    "stacks": "distributor.control.stack_requests",
    "warm_up": "distributor.prepared_run",
}
"""Of each public name, the module that is imported when it is used: a rank needs few of them."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
