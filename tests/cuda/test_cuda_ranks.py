"""Ranks that use a GPU: their backends, warm starts, failures and kills."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import cloudpickle
import pytest
from support.cuda import (
    device_type,
    free_memory,
    needs_gpu,
    only_on_gpu,
    opens_gpu,
    processes_with_gpu,
    until,
    zygotes,
)

from distributor import RunStalled, TorchDistributor, WorkerDied
from distributor.node.process.supervisor import is_supported

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = needs_gpu
GIB = 2**30


def shared(num_processes: int, **settings: Any) -> TorchDistributor:
    """Return a distributor whose ranks all see every GPU, and so share the first."""
    return TorchDistributor(
        num_processes, local_mode=True, use_gpu=False, **{"timeout": 120, **settings}
    )


def reduce(backend: str) -> tuple[str, str, float]:
    """Sum over the ranks; return the backend, the tensor's device and the sum."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend)
    total = torch.tensor([dist.get_rank() + 1.0], device=device_type())
    dist.all_reduce(total)
    return dist.get_backend(), total.device.type, total.item()


@only_on_gpu
def test_one_rank_on_nccl() -> None:
    runner = TorchDistributor(1, local_mode=True, use_gpu=True, timeout=120)
    assert runner.run(reduce, "nccl") == ("nccl", "cuda", 1.0)


def test_ranks_that_share_a_gpu_reduce_its_tensors_on_gloo() -> None:
    assert shared(3).run_all(reduce, "gloo") == [("gloo", device_type(), 6.0)] * 3


@only_on_gpu
def test_a_stall_shows_the_last_collective_of_nccl() -> None:
    def reduce_and_wait() -> None:
        reduce("nccl")
        threading.Event().wait()

    runner = TorchDistributor(1, local_mode=True, use_gpu=True, timeout=120, stall_timeout=3)
    with pytest.raises(RunStalled) as caught:
        runner.run(reduce_and_wait)
    assert "Last collectives:\n  nccl:all_reduce, number 1 of default_pg" in str(caught.value)


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_ranks_use_cuda_while_the_driver_has_it_up(warm: bool) -> None:
    import torch

    if warm and not is_supported():
        pytest.skip("this kernel supports no warm process")
    mine = torch.arange(4.0, device=device_type())
    runner = shared(2, warm=warm)
    for _ in range(2):  # the second run's ranks are forked from a process that has served
        assert runner.run(reduce, "gloo") == ("gloo", device_type(), 3.0)
    assert mine.sum().item() == 6.0, "the driver's own CUDA is as it was"
    if warm:
        [zygote] = zygotes()
        assert not opens_gpu(zygote), "the warm process has never touched CUDA"


def exhaust(leave: int) -> None:
    import torch

    torch.empty(free_memory() + leave, dtype=torch.uint8, device="cuda")


@only_on_gpu
def test_exhausted_memory_is_the_ranks_own_error_and_is_free_again() -> None:
    import torch

    torch.ones(1, device="cuda")
    before = free_memory()
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        shared(1).run(exhaust, GIB)
    until(lambda: free_memory() > before - GIB // 8, "the rank's memory is free", 1.0)


def die_at_work(size: int) -> None:
    """Queue kernels for seconds, and die while they run."""
    import torch

    matrix = torch.ones(size, size, device=device_type())
    for _ in range(200):
        matrix = matrix @ matrix
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_with_kernels_in_flight_frees_the_gpu() -> None:
    import torch

    torch.ones(1, device=device_type())
    before, users = free_memory(), processes_with_gpu()
    with pytest.raises(WorkerDied, match="SIGKILL"):
        shared(1).run(die_at_work, 8192 if device_type() == "cuda" else 64)
    until(lambda: processes_with_gpu() <= users, "no process of the run has the GPU open", 20)
    assert free_memory() >= before - GIB // 8


def work_until_stopped() -> None:
    import torch

    matrix = torch.ones(256, 256, device=device_type())
    while True:
        matrix = (matrix @ matrix).clamp(0, 1)


def test_a_cancelled_run_leaves_no_process_on_the_gpu() -> None:
    import torch

    torch.ones(1, device=device_type())
    users = processes_with_gpu()
    future = shared(2).submit(work_until_stopped)
    if device_type() == "cuda":
        until(lambda: len(processes_with_gpu() - users) == 2, "both ranks use the GPU")
    future.cancel()
    until(lambda: processes_with_gpu() <= users, "no rank has the GPU open", 20)
    assert future.cancelled()


def index_beyond_the_end() -> str:
    import torch

    torch.zeros(2, device="cuda")[torch.tensor([5], device="cuda")]
    return "returned before the kernel failed"


@only_on_gpu
def test_a_kernel_that_fails_after_the_last_statement_fails_the_run() -> None:
    with pytest.raises(Exception, match="device-side assert"):
        shared(1).run(index_beyond_the_end)


def train_and_lose_rank_1(backend: str) -> list[Any]:
    """Train until rank 1 has been killed and replaced."""
    import torch
    import torch.distributed as dist

    from distributor.train.torch import State, prepare_model

    dist.init_process_group(backend)
    device = torch.device(device_type(), int(os.environ["LOCAL_RANK"]) if backend == "nccl" else 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    layers = torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 1)
    model = prepare_model(torch.nn.Sequential(*layers).to(device), move_to_device=False)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    state, own_steps = State(steps=0, sizes=[]), 0
    while len(state.sizes) < 3:
        optimizer.zero_grad()
        model(torch.rand(8, 64, device=device)).square().mean().backward()
        if os.environ["RANK"] == "1" and own_steps == state.steps == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        own_steps += 1
        state.steps += 1
        if state.sizes[-1:] != [dist.get_world_size()]:
            state.sizes = [*state.sizes, dist.get_world_size()]
    weights = [parameter.tolist() for parameter in model.parameters()]
    return [state.sizes, state.steps, os.environ["TORCHELASTIC_RESTART_COUNT"], weights]


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=only_on_gpu)])
def test_a_rank_that_is_lost_in_training_is_replaced(backend: str) -> None:
    import torch

    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL allows one rank for each")
    settings: dict[str, Any] = {"recovery": "in_place", "max_failures": 1, "timeout": 120}
    runner = TorchDistributor(2, local_mode=True, use_gpu=backend == "nccl", **settings)
    one, other = runner.run_all(train_and_lose_rank_1, backend)
    assert (one[0], one[2]) == ([2, 1, 2], "0")
    assert one == other
