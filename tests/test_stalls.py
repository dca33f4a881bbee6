"""A run in which no rank does anything is explained, and ended if the user wants that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest
import torch
from conftest import cluster_is_slow
from support.ranks import Distribute

from distributor import RunStalled, TorchDistributor

cloudpickle.register_pickle_by_value(sys.modules[__name__])
WARNING, TIMEOUT = 1.0, 3.0
BUSY_SECONDS = 3 * WARNING
HAS_RECORDER = hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json")
RECORDS = {"TORCH_FR_BUFFER_SIZE": "100"}
"""Has gloo record its collectives, as NCCL does by default."""


def train() -> None:
    """Enter a collective on all ranks except for the last."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == dist.get_world_size() - 1:
        read_batch()
    dist.barrier()


def read_batch() -> None:
    import threading

    threading.Event().wait()


@cluster_is_slow
def test_a_stalled_run_is_explained_and_ended(
    distribute: Distribute, warned: Callable[[], list[str]]
) -> None:
    with pytest.raises(RunStalled) as caught:
        distribute(3, stall_warning=WARNING, stall_timeout=TIMEOUT, env=RECORDS).run(train)
    (warning,) = warned()
    for text, limit in (warning, "1 s (stall_warning)"), (str(caught.value), "3 s (stall_timeout)"):
        summary, _, stacks = text.partition("\n\nStacks of the ranks")
        assert f"No rank has printed, reported, or used its CPU or GPU for {limit}." in summary
        assert "\n  ranks 0, 1: in barrier, called by train (test_stalls.py:" in summary
        assert "\n  rank 2: in wait, called by read_batch (test_stalls.py:" in summary
        assert "in read_batch" in stacks
        if HAS_RECORDER:
            last = "\nranks 0, 1:\nLast collectives:\n  gloo:barrier, number 1 of default_pg"
            assert last in stacks
    assert sorted(caught.value.stacks) == [0, 1, 2]
    assert "gloo:barrier" not in caught.value.stacks[2]


def compute(seconds: float) -> str:
    """Compute in a single call of C code, which holds the interpreter's lock."""
    import time

    sample = 1_000_000
    started = time.perf_counter()
    sum(range(sample))
    sum(range(round(sample * seconds / (time.perf_counter() - started))))
    return "done"


def compute_elsewhere(seconds: float) -> str:
    """Wait for a process in a session of its own that computes."""
    import subprocess

    source = f"import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-c", source], start_new_session=True, check=True)
    return "done"


@pytest.mark.parametrize("work", [compute, pytest.param(compute_elsewhere, marks=pytest.mark.slow)])
def test_a_busy_run_is_not_warned_of(
    work: Callable[[float], str], warned: Callable[[], list[str]]
) -> None:
    # Of twice the time: on a busy machine, samples of half a second have too few ticks of the CPU.
    runner = TorchDistributor(2, use_gpu=False, stall_warning=2 * WARNING, stall_timeout=TIMEOUT)
    assert runner.run(only_on_rank_1, work, BUSY_SECONDS) == "done"
    assert warned() == []


def only_on_rank_1(work: Callable[[float], str], seconds: float) -> str:
    """Let rank 0 wait for rank 1, which works."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        work(seconds)
    dist.barrier()
    return "done"


def test_a_stalled_attempt_is_followed_by_another(tmp_path: Path) -> None:
    marker = tmp_path / "stalled"

    def stall_once() -> str:
        if marker.exists():
            return "done"
        marker.touch()
        read_batch()
        raise AssertionError("the wait has no end")

    runner = TorchDistributor(1, use_gpu=False, stall_timeout=WARNING, max_failures=1)
    assert runner.run(stall_once) == "done"
