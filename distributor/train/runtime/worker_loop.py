"""What a rank of a `TorchTrainer` runs: the user's function, inside a process group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from distributor.serialization.pickling import name_of
from distributor.train.checkpoint import Checkpoint
from distributor.train.runtime import reporter
from distributor.train.runtime.process_group import TorchConfig, process_group


@dataclass(frozen=True)
class Loop:
    """The user's function and what it is given; called in each rank.

    Parameters
    ----------
    func : callable
        The function, of the configuration or of nothing.
    config : mapping of str to object
        The configuration.
    torch_config : TorchConfig
        The process group.
    filesystem : FileSystem or None
        Where checkpoints are kept, where the address does not say so.
    resume_from : Checkpoint or None
        Where the training begins if it has no checkpoint of its own.
    """

    func: Callable[..., Any]
    config: Mapping[str, Any]
    torch_config: TorchConfig
    filesystem: Any
    resume_from: Checkpoint | None

    def __post_init__(self) -> None:
        _takes_config(self.func)

    @property
    def __name__(self) -> str:
        return name_of(self.func)

    def __call__(self) -> Any:
        """Be a rank: storage is looked at before the training, which may take days."""
        reporter.begin(self.filesystem, self.resume_from)
        with process_group(self.torch_config):
            args = [dict(self.config)] if _takes_config(self.func) else []
            return self.func(*args)


def _takes_config(function: Callable[..., Any]) -> bool:
    """Tell whether a training function takes its configuration.

    Raises
    ------
    TypeError
        For what is no function of one argument or of none.
    """
    if not callable(function):
        raise TypeError(f"train_loop_per_worker is a function, but is {function!r}.")
    signature = inspect.signature(function)
    for takes_config in (True, False):
        try:
            signature.bind(*[{}] * takes_config)
        except TypeError:
            continue
        return takes_config
    raise TypeError(
        "train_loop_per_worker takes train_loop_config or nothing, but is "
        f"{name_of(function)}{signature}."
    )
