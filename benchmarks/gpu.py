"""``python -m benchmarks.gpu``: what ranks on a GPU take; see ``make bench-gpu``."""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.gpu_results import record
from distributor import TorchDistributor
from distributor.train.torch import prepare_data_loader

REPEATS = 5
MEGABYTE = 10**6
VALUE_MB = 1000
BATCHES, BATCH_ROWS, COLUMNS = 200, 4096, 1024
TITLES = {
    "warm_rank": "a rank of a later run, until its first kernel is done",
    "cold_rank": "the same with warm=False",
    "spawned_rank": "the same with torch.multiprocessing.spawn",
    "first_kernel": "the first kernel alone, in a rank",
    "value": f"a value of {VALUE_MB:,} MB in GPU memory, until the driver has it",
    "prepared_loader": "an epoch whose batches are copied while the GPU works",
    "plain_loader": "the same with a plain DataLoader and .to(device)",
}


def main() -> int:
    """Measure, print and write the results; without a GPU, say so."""
    import torch

    if not torch.cuda.is_available():
        print("bench-gpu needs a GPU, and torch finds none here: nothing is measured.")
        return 1
    torch.ones(1, device="cuda")  # a notebook's driver often has CUDA up
    found = {}
    for name, seconds in _measurements():
        found[name] = {"title": TITLES[name], "unit": "s", "values": seconds}
        print(f"{TITLES[name]}: {statistics.median(seconds):.3g} s", flush=True)
    record("benchmarks", found)
    return 0


def _measurements() -> Iterator[tuple[str, list[float]]]:
    runner = TorchDistributor(1, local_mode=True, use_gpu=True)
    yield "warm_rank", _repeated(lambda: runner.run(first_kernel))
    cold = TorchDistributor(1, local_mode=True, use_gpu=True, warm=False)
    yield "cold_rank", _repeated(lambda: cold.run(first_kernel))
    yield "spawned_rank", _repeated(_spawn)
    yield "first_kernel", [runner.run(first_kernel) for _ in range(REPEATS)]
    yield "value", [_seconds_of_value(runner) for _ in range(REPEATS)]
    for name in ("prepared_loader", "plain_loader"):
        yield name, [runner.run(epoch, name) for _ in range(REPEATS)]


def _repeated(run: Callable[[], object]) -> list[float]:
    run()
    return [_seconds(run) for _ in range(REPEATS)]


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _spawn() -> None:
    process = multiprocessing.get_context("spawn").Process(target=first_kernel)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError("the spawned process failed")


def _seconds_of_value(runner: TorchDistributor) -> float:
    made_at, _ = runner.run(value)
    return time.time() - float(made_at)


def first_kernel() -> float:
    """Run one kernel, and return its seconds with CUDA's initialization."""
    import torch

    began = time.perf_counter()
    torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def value() -> tuple[float, Any]:
    """Return a tensor in GPU memory, and when it was made."""
    import torch

    tensor = torch.ones(VALUE_MB * MEGABYTE // 4, device="cuda")
    torch.cuda.synchronize()
    return time.time(), tensor


def epoch(loader_name: str) -> float:
    """Read batches and multiply matrices on the GPU; return the seconds of an epoch."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    rows = torch.randn(BATCH_ROWS, COLUMNS)
    dataset = TensorDataset(rows.repeat(4, 1))
    plain = DataLoader(dataset, batch_size=BATCH_ROWS)
    loader = prepare_data_loader(plain) if loader_name == "prepared_loader" else plain
    weights = torch.randn(COLUMNS, COLUMNS, device="cuda")
    seconds = 0.0
    for _ in range(2):  # the first epoch also allocates memory
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(BATCHES // len(plain)):
            for (batch,) in loader:
                batch.to("cuda") @ weights
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    return seconds


if __name__ == "__main__":
    sys.exit(main())
