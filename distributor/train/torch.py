"""Training with PyTorch, in the names of ``ray.train.torch``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from distributor import runtime
from distributor.train.runtime.process_group import TorchConfig, device, ensure_group
from distributor.train.trainer import TorchTrainer

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

__all__ = [
    "TorchConfig",
    "TorchTrainer",
    "get_device",
    "get_devices",
    "prepare_data_loader",
    "prepare_model",
]


def get_device() -> torch.device:
    """Give this rank's device: its GPU where it has one, else the CPU."""
    return device()


def get_devices() -> list[torch.device]:
    """Give this rank's devices; there is one."""
    return [device()]


def prepare_model(
    model: torch.nn.Module,
    move_to_device: bool | torch.device = True,
    parallel_strategy: Literal["ddp", "fsdp"] | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """Move a model to this rank's device, and train it together with the other ranks.

    Parameters
    ----------
    model : Module
        The model.
    move_to_device : bool or device
        Whether it is moved, or where to.
    parallel_strategy : "ddp", "fsdp" or None
        DistributedDataParallel, FullyShardedDataParallel, or neither. One rank needs neither.
    parallel_strategy_kwargs : mapping of str to object, optional
        What else the strategy's class takes.

    Raises
    ------
    ValueError
        For a strategy of another name.
    """
    if parallel_strategy not in ("ddp", "fsdp", None):
        raise ValueError(f"parallel_strategy is 'ddp', 'fsdp' or None, not {parallel_strategy!r}.")
    where = device() if isinstance(move_to_device, bool) else move_to_device
    if move_to_device:
        model = model.to(where)
    if parallel_strategy is None or runtime.get_world_size() == 1:
        return model
    ensure_group()
    return _parallel(model, parallel_strategy, where, dict(parallel_strategy_kwargs or {}))


def _parallel(
    model: torch.nn.Module, strategy: str, where: torch.device, options: dict[str, Any]
) -> torch.nn.Module:
    if strategy == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        devices = {"device_ids": [where]} if where.type == "cuda" else {}
        return DistributedDataParallel(model, **{**devices, **options})
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, **{"device_id": where, **options})


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
) -> Any:
    """Have a loader give this rank's share, on this rank's device.

    A checkpoint that is reported keeps how far the loader is. After a restart, on however many
    ranks, the first pass of the same epoch goes on from there: no sample is trained twice, none
    left out. (Where an epoch does not divide by the ranks some samples are repeated at its end, as
    torch's DistributedSampler does.) The batch in hand when `report` is called counts as trained.

    Parameters
    ----------
    data_loader : DataLoader
        A loader over a dataset whose length is known, in order or shuffled.
    add_dist_sampler : bool
        Whether each rank gets its share; otherwise the loader's own sampler sees to that.
    move_to_device : bool
        Whether batches are moved.
    auto_transfer : bool
        Whether that overlaps with training, by way of pinned memory.

    Returns
    -------
    iterable
        With the loader's attributes. Call ``sampler.set_epoch`` to shuffle each epoch differently.

    Raises
    ------
    ValueError
        For a sampler of another kind, which would be lost.
    """
    from distributor.train.runtime.resumable_loader import prepared

    where = device() if move_to_device else None
    return prepared(data_loader, share=add_dist_sampler, device=where, pinned=auto_transfer)
