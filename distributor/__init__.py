"""Run a PyTorch function or script on many ranks, on this machine or on a Spark cluster."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from distributor import runtime

if TYPE_CHECKING:
    from distributor.control.future import RunFuture
    from distributor.control.run import stacks
    from distributor.deepspeed_distributor import DeepspeedTorchDistributor
    from distributor.diagnosis import doctor
    from distributor.errors import (
        ApplicationEnded,
        DistributorError,
        ExecutorNotReady,
        LogError,
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
    from distributor.rank.messages import Progress, Reported
    from distributor.report.runs import Page, save_page
    from distributor.serialization.outcome import load_value
    from distributor.serverless import distributed
    from distributor.settings import Listener
    from distributor.torch_distributor import TorchDistributor, warm_up
    from distributor.version import __version__

__all__ = [
    "ApplicationEnded",
    "DeepspeedTorchDistributor",
    "DistributorError",
    "ExecutorNotReady",
    "Listener",
    "LogError",
    "NodeLost",
    "Page",
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
    "save_page",
    "stacks",
    "warm_up",
]

_MODULES = {
    "DeepspeedTorchDistributor": "distributor.deepspeed_distributor",
    "Listener": "distributor.settings",
    "Page": "distributor.report.runs",
    "Progress": "distributor.rank.messages",
    "Reported": "distributor.rank.messages",
    "RunFuture": "distributor.control.future",
    "TorchDistributor": "distributor.torch_distributor",
    "__version__": "distributor.version",
    "cool_down": "distributor.launchers.local",
    "distributed": "distributor.serverless",
    "doctor": "distributor.diagnosis",
    "load_value": "distributor.serialization.outcome",
    "save_page": "distributor.report.runs",
    "stacks": "distributor.control.run",
    "warm_up": "distributor.torch_distributor",
}
"""Of each public name that is no error's, the module that is imported when it is used.

A rank needs few of them.
"""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_MODULES.get(name, "distributor.errors"))
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
