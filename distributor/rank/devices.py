"""The device of a rank, and batches on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from distributor.rank.context import worker_context

if TYPE_CHECKING:
    import torch


def device() -> torch.device:
    """Return this rank's GPU if the run uses GPUs, else the CPU; outside a run the current GPU."""
    import torch

    if not (worker_context().uses_gpus and torch.cuda.is_available()):
        return torch.device("cpu")
    if "LOCAL_RANK" not in os.environ:
        return torch.device("cuda", torch.cuda.current_device())
    # The ranks of a node see all of its GPUs: one for each, unless `env` sets
    # CUDA_VISIBLE_DEVICES to fewer, which they then share.
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def finish_gpu_work() -> None:
    """Wait for the kernels that this process has started on its GPU, if any."""
    # Otherwise, the error of one that fails after the program's last statement would be lost, or
    # would look like an error of what pickles the program's value.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def move(batch: Any, target: torch.device) -> Any:
    """Return a batch with its tensors on a device; pinned ones are copied asynchronously."""
    return _map_tensors(lambda tensor: tensor.to(target, non_blocking=True), batch)


def pin(batch: Any) -> Any:
    """Return a batch with its tensors in pinned memory."""
    return _map_tensors(lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory(), batch)


def _map_tensors(change: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    import torch

    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return type(batch)({key: _map_tensors(change, part) for key, part in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map_tensors(change, part) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_map_tensors(change, part) for part in batch)
    return batch
