"""The functions that ranks run, the same for every launcher."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

MEGABYTE = 10**6
PIECE = 64 * MEGABYTE
"""Maximum bytes of one tensor, like a layer of a model."""
STEPS = 100
"""Of the training of a trial."""


def rendezvous() -> int:
    """Rendezvous, reduce once and leave; return the number of ranks."""
    import torch
    import torch.distributed as dist

    ours = not dist.is_initialized()  # Ray Train initializes the group before the function runs
    if ours:
        dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    if ours:
        dist.destroy_process_group()
    return int(ones.item())


def nothing() -> None:
    """Do nothing."""


def weights(size: int, mark: float = 1.0) -> dict[str, Tensor]:
    """Return float32 tensors of `size` bytes in total, each filled with its own number."""
    import torch

    starts = range(0, size, PIECE)
    return {
        f"layer{index}": torch.full((min(PIECE, size - start) // 4,), index + mark)
        for index, start in enumerate(starts)
    }


def weights_of_rank_0(size: int, mark: float = 1.0) -> dict[str, Tensor] | None:
    """Return `weights` on rank 0, and None on other ranks."""
    return weights(size, mark) if int(os.environ.get("RANK", "0")) == 0 else None


def made_and_kept(size: int) -> int:
    """Create the same tensors on rank 0, and return only their number."""
    return len(weights_of_rank_0(size) or ())


def is_intact(tensors: dict[str, Tensor], size: int, mark: float = 1.0) -> bool:
    """Return whether these are the tensors of `weights`, by their sizes and both ends of each."""
    whole = sum(tensor.numel() * 4 for tensor in tensors.values()) == size // 4 * 4
    return whole and all(
        tensor[0].item() == tensor[-1].item() == index + mark
        for index, tensor in enumerate(tensors.values())
    )


def total(tensors: dict[str, Tensor]) -> float:
    """Read all elements of the tensors."""
    return sum(float(tensor.sum()) for tensor in tensors.values())


def save_in_turns(size: int, turns: int, storage: str) -> list[dict[str, float]]:
    """Save tensors of `size` bytes on all ranks, in several ways in turn.

    Parameters
    ----------
    size, turns : int
        Bytes of this rank, and number of measurements of each way, after one to warm up.
    storage : str
        The folder of the reports; it is emptied each time.

    Returns
    -------
    list of dict
        For each turn, the seconds of a save alone, of a save and a report that moves or copies the
        folder, and for which a report in the background blocks this rank.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo")
    state = {f"{dist.get_rank()}.{name}": tensor for name, tensor in weights(size).items()}
    seconds_by_way = []
    names = list(WAYS_TO_SAVE)
    for turn in range(1 + turns):
        first = turn % len(names)  # leftovers of one way would always slow the same next one
        order = [*names[first:], *names[:first]]
        seconds_by_way.append({name: _saved(WAYS_TO_SAVE[name], state, storage) for name in order})
    dist.destroy_process_group()
    return seconds_by_way[1:]


def _saved(way: Callable[[Any, str], float], state: Any, storage: str) -> float:
    """Save in one way, after all earlier writes have reached the disk."""
    import torch.distributed as dist

    folder = f"{storage}-local"
    if dist.get_rank() == 0:
        for leftover in (folder, storage):
            shutil.rmtree(leftover, ignore_errors=True)
        os.makedirs(storage)
        os.sync()
    dist.barrier()
    seconds = way(state, folder)
    dist.barrier()
    return seconds


def _save(state: Any, folder: str) -> float:
    import torch.distributed.checkpoint as dcp

    began = time.perf_counter()
    dcp.save(state, checkpoint_id=folder)  # type: ignore[attr-defined]
    return time.perf_counter() - began


def _report(folder: str, mode: str = "SYNC", take: bool = True) -> float:
    from distributor import train

    began = time.perf_counter()
    train.report(
        {},
        checkpoint=train.Checkpoint.from_directory(folder),
        checkpoint_upload_mode=train.CheckpointUploadMode(mode),
        delete_local_checkpoint_after_upload=take,
    )
    return time.perf_counter() - began


def _report_in_the_background(state: Any, folder: str) -> float:
    from distributor import train

    _save(state, folder)
    blocked = _report(folder, "ASYNC")
    train.report({})  # waits for the report
    return blocked


def fit_noted(lr: float, width: int, seconds: float, folder: str | None = None) -> float:
    """Train a small model, or sleep; return the loss.

    Parameters
    ----------
    lr, width : float, int
        The learning rate, and the width of the model.
    seconds : float
        Sleep for so long instead of training.
    folder : str, optional
        Write the seconds in this function to a file of this rank in the folder.
    """
    began = time.time()
    loss = 0.0
    if seconds:
        time.sleep(seconds)
    else:
        loss = _fit(lr, width)
    if folder is not None:
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            file.write(f"{time.time() - began}")
    return loss


def _fit(lr: float, width: int) -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    x = torch.randn(256, 8)
    y = x.sum(1, keepdim=True)
    for _ in range(STEPS):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
    return float(loss)


WAYS_TO_SAVE: dict[str, Callable[[Any, str], float]] = {
    "alone": _save,
    "taken": lambda state, folder: _save(state, folder) + _report(folder),
    "kept": lambda state, folder: _save(state, folder) + _report(folder, take=False),
    "blocked": _report_in_the_background,
}
