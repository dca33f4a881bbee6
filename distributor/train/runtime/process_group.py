"""A rank's process group."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from distributor.core.spelling import checks_keywords
from distributor.rank.devices import device


class BackendConfig:
    """The base class of `TorchConfig`.

    Follows ``ray.train.BackendConfig``, whose other subclasses have no counterpart here:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.backend.BackendConfig.html

    Examples
    --------
    >>> isinstance(TorchConfig(), BackendConfig)
    True
    """

    @property
    def backend_cls(self) -> Any:
        """Not supported: raises NotImplementedError."""
        raise NotImplementedError(
            "Backends of Ray Train are not supported: the ranks of TorchTrainer always have the "
            "process group of its TorchConfig, and code that prepares them belongs in "
            "train_loop_per_worker."
        )

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[object]]:
        """What the training function runs in: nothing."""
        return nullcontext

    @property
    def framework(self) -> str | None:
        """The framework's name."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration."""
        return {}


@checks_keywords
@dataclass
class TorchConfig(BackendConfig):
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

    @property
    def framework(self) -> str:
        """The framework's name: ``"torch"``."""
        return "torch"

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration."""
        return asdict(self)


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
