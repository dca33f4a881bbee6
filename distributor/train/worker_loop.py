"""The program of each rank of a `TorchTrainer`: the user's function, inside a process group."""

from __future__ import annotations

import gc
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from distributor.programs import check_runs
from distributor.rank.context import device
from distributor.screen.messages import warn_once
from distributor.serialization.pickle_diagnostics import name_of
from distributor.settings import must_be
from distributor.train.config import InvalidArgument, TorchConfig
from distributor.train.runtime.session import InProcessRun, needs_process_group, session
from distributor.train.storage.checkpoint import Checkpoint

if TYPE_CHECKING:
    from distributor.data.shard import DatasetShard


def ensure_group(config: TorchConfig | None = None) -> None:
    """Create the default process group, unless there is one."""
    import torch.distributed as dist

    if dist.is_initialized():
        return
    here = device()
    if here.type == "cuda":
        import torch

        torch.cuda.set_device(here)
    config = config or TorchConfig()
    backend = config.backend or ("cpu:gloo,cuda:nccl" if here.type == "cuda" else "gloo")
    dist.init_process_group(backend, timeout=timedelta(seconds=config.timeout_s))
    dist.barrier()  # if a rank ended before another has connected, that one would fail


@contextmanager
def process_group(config: TorchConfig) -> Iterator[None]:
    """Provide a process group; a rank that fails does not destroy it, and ends."""
    import torch.distributed as dist

    ensure_group(config)
    os.environ.setdefault("ACCELERATE_TORCH_DEVICE", str(device()))  # for Accelerate, as in Ray
    yield
    gc.collect()  # a model in a reference cycle would outlive its group, and gloo could hang
    if dist.is_initialized():
        dist.destroy_process_group()


def loop_arguments(
    function: Callable[..., Any],
    config: Any,
    name: str = "train_loop_per_worker",
    config_name: str = "train_loop_config",
) -> list[Any]:
    """Return the configuration, or nothing if each parameter has a default, as in Ray Train.

    Whether the training function can be called like that is checked.
    """
    must_be("a function", callable, InvalidArgument)(name, function)
    check_runs(function)
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in function without a signature
        return [config] if config else []
    args = [config] if any(map(_is_required, signature.parameters.values())) else []
    with suppress(TypeError):
        signature.bind(*args)
        return args
    raise InvalidArgument(
        f"{name} must take {config_name} or no argument, but is {name_of(function)}{signature}."
    )


def _is_required(parameter: inspect.Parameter) -> bool:
    # For Ray, *args is a parameter without a default, and keyword-only ones do not count.
    optional = (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and parameter.kind not in optional


@dataclass(frozen=True)
class WorkerLoop:
    """Calls the user's training function in a rank."""

    func: Callable[..., Any]  # takes `config`, or nothing
    config: Any  # usually a dict
    torch_config: TorchConfig
    filesystem: Any  # replaces the one that the storage path names
    resume_from: Checkpoint | None

    def __post_init__(self) -> None:
        args = self._args()
        if self.config and not args:
            warn_once(
                f"train_loop_config is not passed to {name_of(self.func)}, which has no parameter "
                "without a default. Write config as its first parameter, without a default."
            )

    @property
    def __name__(self) -> str:
        return name_of(self.func)

    def __call__(
        self, datasets: Mapping[str, DatasetShard] | None = None, config: Any = None
    ) -> Any:
        """Run the function, perhaps with another configuration.

        Storage is checked first, not at the first report.
        """
        session.dataset_shards = datasets or {}
        session.start_reporter(self.filesystem, self.resume_from)
        with process_group(self.torch_config):
            args = self._args() if config is None else loop_arguments(self.func, config)
            return self.func(*args)

    def run_in_process(
        self, name: str, datasets: Mapping[str, DatasetShard]
    ) -> tuple[InProcessRun, Any]:
        """Run the function in this process, and return what it has reported, and its value."""
        session.dataset_shards = datasets
        group = process_group(self.torch_config) if needs_process_group() else nullcontext()
        with session.run_in_process(name, self.resume_from) as run, group:
            return run, self.func(*self._args())

    def _args(self) -> list[Any]:
        return loop_arguments(self.func, self.config)
