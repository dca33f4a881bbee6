"""A rank's device and its process group."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from distributor import runtime
from distributor.node.worker.worker_context import worker_context

if TYPE_CHECKING:
    import torch


@dataclass
class TorchConfig:
    """Configuration of the process group that `TorchTrainer` creates.

    Follows ``ray.train.torch.TorchConfig``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.torch.TorchConfig.html

    Parameters
    ----------
    backend : str, optional
        The backend of ``torch.distributed``, such as ``"gloo"`` or ``"nccl"``. By default gloo for
        CPU tensors and, if the ranks have GPUs, NCCL for GPU tensors.
    init_method : "env" or "tcp", default "env"
        How ranks find rank 0. Both use the run's address.
    timeout_s : int, default 1800
        The time that a collective may take, in seconds.

    Raises
    ------
    ValueError
        If `init_method` is neither ``"env"`` nor ``"tcp"``, or `timeout_s` is not a positive
        number.
    TypeError
        If `backend` is not a string.

    Examples
    --------
    >>> TorchConfig(backend="gloo", timeout_s=60)
    TorchConfig(backend='gloo', init_method='env', timeout_s=60)
    """

    backend: str | None = None
    init_method: str = "env"
    timeout_s: int = 1800

    def __post_init__(self) -> None:
        if self.init_method not in ("env", "tcp"):
            raise ValueError(f"init_method must be 'env' or 'tcp', but is {self.init_method!r}.")
        if self.backend is not None and not isinstance(self.backend, str):
            raise TypeError(
                f"backend must be a string such as 'gloo' or 'nccl', but is {self.backend!r}."
            )
        is_number = isinstance(self.timeout_s, (int, float)) and not isinstance(
            self.timeout_s, bool
        )
        if not is_number or not self.timeout_s > 0:
            raise ValueError(
                f"timeout_s must be a positive number of seconds, but is {self.timeout_s}."
            )


def device() -> torch.device:
    """Return this rank's GPU if it has one, and the run uses GPUs, else the CPU."""
    import torch

    if not (worker_context().uses_gpus and torch.cuda.is_available()):
        return torch.device("cpu")
    # Each rank sees only its own GPU, unless CUDA_VISIBLE_DEVICES has been set otherwise.
    return torch.device("cuda", runtime.get_local_rank() % torch.cuda.device_count())


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
    yield
    gc.collect()  # a model in a reference cycle would outlive its group, and gloo could hang
    if dist.is_initialized():
        dist.destroy_process_group()
