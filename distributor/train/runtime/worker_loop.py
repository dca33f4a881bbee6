"""The program of each rank of a `TorchTrainer`: the user's function, inside a process group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distributor.launch.programs import check_runs
from distributor.serialization.pickle_diagnostics import name_of
from distributor.train.checkpoint import Checkpoint
from distributor.train.config import InvalidArgument
from distributor.train.runtime.in_process import InProcessRun, needs_process_group
from distributor.train.runtime.process_group import TorchConfig, process_group
from distributor.train.runtime.session import session

if TYPE_CHECKING:
    from distributor.data.shard import DatasetShard


@dataclass(frozen=True)
class WorkerLoop:
    """Calls the user's training function in a rank.

    Parameters
    ----------
    func : callable
        The function. It takes the configuration, or nothing.
    config : object
        The configuration, usually a dict.
    torch_config : TorchConfig
        The process group.
    filesystem : FileSystem or None
        The file system of the storage path; None for the one that the path names.
    resume_from : Checkpoint or None
        The checkpoint to start from if the run has none of its own.

    Raises
    ------
    TypeError
        If `func` is not a function of one argument or of none.
    """

    func: Callable[..., Any]
    config: Any
    torch_config: TorchConfig
    filesystem: Any
    resume_from: Checkpoint | None

    def __post_init__(self) -> None:
        _takes_config(self.func, self.config)

    @property
    def __name__(self) -> str:
        return name_of(self.func)

    def __call__(self, datasets: Mapping[str, DatasetShard] | None = None) -> Any:
        """Run the function; storage is checked first, not at the first report."""
        session.dataset_shards = datasets or {}
        session.start_reporter(self.filesystem, self.resume_from)
        with process_group(self.torch_config):
            return self.run_func()

    def run_in_process(
        self, name: str, datasets: Mapping[str, DatasetShard]
    ) -> tuple[InProcessRun, Any]:
        """Run the function in this process, and return what it has reported, and its value."""
        session.dataset_shards = datasets
        group = process_group(self.torch_config) if needs_process_group() else nullcontext()
        with session.run_in_process(name, self.resume_from) as run, group:
            return run, self.run_func()

    def run_func(self) -> Any:
        """Call the function with its configuration, or with nothing."""
        args = [self.config] if _takes_config(self.func, self.config) else []
        return self.func(*args)


def _takes_config(function: Callable[..., Any], config: object) -> bool:
    """Return whether a training function is called with its configuration.

    If it takes it or nothing, it is called with one that is not empty.

    Raises
    ------
    InvalidArgument
        If it is not a function of one argument or of none.
    """
    if not callable(function):
        raise InvalidArgument(f"train_loop_per_worker must be a function, but is {function!r}.")
    check_runs(function)
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in function without a signature
        return bool(config)
    for takes_config in (True, False) if config else (False, True):
        with suppress(TypeError):
            signature.bind(*[{}] * takes_config)
            return takes_config
    raise InvalidArgument(
        "train_loop_per_worker must take train_loop_config or no argument, but is "
        f"{name_of(function)}{signature}."
    )
