"""The functions that ranks run, the same for every launcher."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

MEGABYTE = 10**6
PIECE = 64 * MEGABYTE
"""Maximum bytes of one tensor, like a layer of a model."""
LINE = "line"
"""Start of each printed line."""


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


def print_lines(count: int) -> tuple[float, float]:
    """Print short lines as fast as possible; return the start time and the duration."""
    began, clock = time.perf_counter(), time.time()
    for number in range(count):
        print(LINE, number)
    return clock, time.perf_counter() - began


def loop(seconds: float, lines_per_second: int) -> float:
    """Compute while printing at a steady rate; return the steps per second."""
    import torch

    torch.set_num_threads(1)
    matrix = torch.rand(192, 192)
    began = now = time.perf_counter()
    steps = lines = 0
    while now - began < seconds:
        matrix = torch.tanh(matrix @ matrix)
        steps += 1
        now = time.perf_counter()
        while lines < (now - began) * lines_per_second:
            print(LINE, lines)
            lines += 1
    return steps / (now - began)


def logging_loop(steps: int, way: str) -> float:
    """Compute, and log a metric at each step in the given way; return the steps per second."""
    import torch

    torch.set_num_threads(1)
    matrix = torch.rand(192, 192)
    log = _logging(way)
    began = time.perf_counter()
    for step in range(steps):
        for _ in range(20):
            matrix = torch.tanh(matrix @ matrix)
        log(step, float(matrix[0, 0]))
    return steps / (time.perf_counter() - began)


def train(steps: int, warm_up: int) -> float:
    """Train a small model with DDP; return the steps per second after the warm-up."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step = _training()
    for _ in range(warm_up):
        step()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    seconds = time.perf_counter() - began
    # In the interpreter's finalization, gloo's threads would abort the process if they still had
    # tensors to release.
    time.sleep(0.1)
    dist.destroy_process_group()
    return steps / seconds


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


def weigh(driver: int) -> dict[str, Any]:
    """Do one training step and measure the memory of this run's live processes.

    Parameters
    ----------
    driver : int
        The process whose descendants are the run; it is not counted.

    Returns
    -------
    dict
        The proportional set size, in bytes, of each rank and of all the run's processes.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo")
    _training()()
    dist.barrier()
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, _pss(os.getpid()))
    run = _pss_of_descendants(driver) if dist.get_rank() == 0 else 0
    dist.barrier()
    dist.destroy_process_group()
    return {"ranks": ranks, "run": run}


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


WAYS_TO_SAVE: dict[str, Callable[[Any, str], float]] = {
    "alone": _save,
    "taken": lambda state, folder: _save(state, folder) + _report(folder),
    "kept": lambda state, folder: _save(state, folder) + _report(folder, take=False),
    "blocked": _report_in_the_background,
}


def _logging(way: str) -> Callable[[int, float], object]:
    if way == "ours":
        from distributor import runtime

        return lambda step, loss: runtime.progress(step, loss=loss)
    if way:
        import mlflow

        at_once = way == "mlflow"
        return lambda step, loss: mlflow.log_metric("loss", loss, step=step, synchronous=at_once)
    return lambda step, loss: None


def _training() -> Any:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, labels = torch.rand(64, 256), torch.randint(10, (64,))

    def step() -> None:
        optimizer.zero_grad()
        loss: Any = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()

    return step


def _pss(pid: int) -> int:
    from benchmarks.packages import library

    return int(library("psutil").Process(pid).memory_full_info().pss)


def _pss_of_descendants(pid: int) -> int:
    from benchmarks.packages import library

    family = library("psutil").Process(pid).children(recursive=True)
    return sum(_pss(process.pid) for process in family)
