"""A rank's device and its process group."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from distributor import runtime

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TorchConfig:
    """The process group of a training, in Ray Train's names.

    Parameters
    ----------
    backend : str, optional
        By default gloo for tensors of the CPU and, where ranks have GPUs, NCCL for theirs.
    init_method : "env"
        The way to rank 0; there is one.
    timeout_s : int
        Seconds that a collective may take.
    """

    backend: str | None = None
    init_method: str = "env"
    timeout_s: int = 1800

    def __post_init__(self) -> None:
        if self.init_method != "env":
            raise ValueError(
                f"init_method is {self.init_method!r}, but ranks find each other by 'env' alone."
            )
        if self.backend is not None and not isinstance(self.backend, str):
            raise TypeError(f"backend is 'gloo', 'nccl' and so on, but is {self.backend!r}.")
        number = isinstance(self.timeout_s, (int, float)) and not isinstance(self.timeout_s, bool)
        if not number or not self.timeout_s > 0:
            raise ValueError(f"timeout_s is a positive number of seconds, but is {self.timeout_s}.")


def device() -> torch.device:
    """Give this rank's device: its GPU where it has one."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    # Each rank sees its own GPU alone, unless somebody set the mask otherwise.
    return torch.device("cuda", runtime.get_local_rank() % torch.cuda.device_count())


def ensure_group(config: TorchConfig | None = None) -> None:
    """Make the process group, where there is none."""
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
    dist.barrier()  # a rank that ends sooner than another has connected would fail that one


@contextmanager
def process_group(config: TorchConfig) -> Iterator[None]:
    """Have a process group for a while; a rank that fails leaves it as it is, and ends."""
    import torch.distributed as dist

    ensure_group(config)
    yield
    gc.collect()  # a model in a cycle would outlive its group, and gloo may then wait for ever
    if dist.is_initialized():
        dist.destroy_process_group()
