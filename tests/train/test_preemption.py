"""If a process is about to end, all ranks are notified at one step, and can save a checkpoint."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cloudpickle
import psutil
import pytest
from support.waiting import MARK, assert_gone, marked, until

from distributor import TorchDistributor, train
from distributor.train.storage.checkpoint_store import Storage

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TRAINING = """
import os, signal, sys, tempfile, threading, time
from pathlib import Path
from distributor import TorchDistributor, train
from distributor.control.waiting import GracefulShutdown
from distributor.train import Checkpoint

FOLDER = sys.argv[1]
ENDLESS = 10**9


def show_subscription(shutdown):
    # The test waits for the subscription of a rank to reach the driver.
    start_attempt, subscribe = shutdown.start_attempt, shutdown.subscribe
    shown = Path(FOLDER, "subscribed")

    def start_attempt_and_hide(self, notify_ranks):
        shown.unlink(missing_ok=True)
        start_attempt(self, notify_ranks)

    def subscribe_and_show(self):
        subscribe(self)
        shown.touch()

    shutdown.start_attempt, shutdown.subscribe = start_attempt_and_hide, subscribe_and_show


show_subscription(GracefulShutdown)


def loop():
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    rank, notified_ranks = dist.get_rank(), torch.zeros(1)
    checkpoint = train.get_checkpoint()
    first = int(Path(checkpoint.path, "rank0.txt").read_text()) + 1 if checkpoint else 0
    for step in range(first, ENDLESS):
        preempted = train.is_preempted()
        notified_ranks[0] = float(preempted)
        dist.all_reduce(notified_ranks)
        assert notified_ranks.item() in (0, dist.get_world_size()), "all ranks or none"
        if preempted:
            print("notified at step", step, signal.getsignal(signal.SIGTERM), flush=True)
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, f"rank{rank}.txt").write_text(str(step))
                train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder))
        time.sleep(0.01)  # a batch's time, without its CPU time
        if step == first + 20:
            Path(FOLDER, f"pid-{rank}-{int(first > 0)}").write_text(str(os.getpid()))
    return step
"""
LOCAL = """
before = signal.getsignal(signal.SIGTERM)
distributor = TorchDistributor(
    3, use_gpu=False, storage_path=FOLDER, name="run", max_failures=1, timeout=120
)
value = distributor.run(loop)
assert signal.getsignal(signal.SIGTERM) == before
print("returned", value, flush=True)
"""
CLUSTER = """
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local-cluster[2,1,1024]").config("spark.ui.enabled", "false")
spark = builder.config("spark.decommission.enabled", "true").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
distributor = TorchDistributor(
    (1, 2),
    local_mode=False,
    use_gpu=False,
    storage_path=FOLDER,
    name="run",
    max_failures=1,
    barrier=BARRIER,
    warm=False,  # so that a rank is a descendant of its executor
)
print("returned", distributor.run(loop), flush=True)
"""


class Run:
    """A driver in its own process, and its ranks."""

    def __init__(self, folder: Path, process: subprocess.Popen[str], mark: str) -> None:
        self.folder, self.process, self.mark = folder, process, mark

    def rank_pids(self, count: int, resumed: bool = False) -> list[int]:
        """Wait until each rank has trained for some steps, and return the processes' ids.

        With `resumed`, wait for the ranks of an attempt that resumes from a checkpoint.
        """
        files = [self.folder / f"pid-{rank}-{int(resumed)}" for rank in range(count)]
        until(lambda: all(f.exists() and f.read_text() for f in files), "the ranks train", 100)
        until((self.folder / "subscribed").exists, "the driver knows that ranks take notices")
        return [int(file.read_text()) for file in files]

    def wait(self) -> tuple[int, str]:
        """Wait until all processes have ended, and return the exit code and the output."""
        output, _ = self.process.communicate(timeout=100)
        until(lambda: not marked(self.mark), "all processes of the driver have ended")
        return self.process.returncode, output

    def checkpointed_steps(self) -> list[int]:
        """Return the steps whose checkpoints are in storage."""
        checkpoints = Storage(self.folder, "run").committed()
        return [manifest.metrics["step"] for _, manifest in checkpoints]


@contextmanager
def driver(folder: Path, source: str) -> Iterator[Run]:
    script, mark = folder / "driver.py", uuid.uuid4().hex
    script.write_text(TRAINING + source)
    with subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        env={**os.environ, MARK: mark, "PYSPARK_PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield Run(folder, process, mark)
        finally:
            for remaining in marked(mark):
                remaining.kill()


def executor_of(rank_pid: int) -> psutil.Process:
    (executor, *_) = [
        parent
        for parent in psutil.Process(rank_pid).parents()
        if "CoarseGrainedExecutorBackend" in " ".join(parent.cmdline())
    ]
    return executor


def notified_steps(output: str) -> set[int]:
    """Return the steps at which any rank was notified."""
    return {int(step) for step in re.findall(r"notified at step (\d+)", output)}


def test_after_sigterm_a_rank_and_the_driver_wait_for_a_checkpoint(tmp_path: Path) -> None:
    """The second SIGTERM ends the rank, and so the attempt; the next one resumes."""
    with driver(tmp_path, LOCAL) as run:
        pids = run.rank_pids(3)
        os.kill(pids[1], signal.SIGTERM)
        until(run.checkpointed_steps, "a checkpoint is stored")
        os.kill(pids[1], signal.SIGTERM)
        resumed_pids = run.rank_pids(3, resumed=True)
        run.process.terminate()
        code, output = run.wait()
    assert code == -signal.SIGTERM, output
    assert "was killed by SIGTERM" in output, "the first attempt failed"
    assert "Received SIGTERM: the ranks are notified, and this process ends once" in output
    assert "returned" not in output
    assert set(run.checkpointed_steps()) == notified_steps(output)
    assert len(run.checkpointed_steps()) == 2, "the second attempt resumed from the first one's"
    assert_gone([*pids, *resumed_pids])


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("barrier", [True, False], ids=["barrier", "ordinary"])
def test_all_ranks_are_notified_of_a_decommissioned_executor(tmp_path: Path, barrier: bool) -> None:
    with driver(tmp_path, CLUSTER.replace("BARRIER", str(barrier))) as run:
        pids = run.rank_pids(2)
        executor = executor_of(pids[1])
        executor.send_signal(signal.SIGPWR)
        until(run.checkpointed_steps, "a checkpoint is stored", 60)
        (first,) = run.checkpointed_steps()
        executor.kill()  # as the cluster manager does after the announcement
        (resumed_pid,) = run.rank_pids(1, resumed=True)
        assert executor_of(resumed_pid) != executor
        run.process.terminate()
        code, output = run.wait()
    assert code == -signal.SIGTERM, output
    assert "Spark is about to end executor " in output
    assert "Starting the next attempt" in output
    assert first in notified_steps(output), "all ranks were notified at one step, and none was lost"
    assert run.checkpointed_steps()[0] == first
    assert len(run.checkpointed_steps()) == 2, "the next attempt had its own notice"
    assert_gone([*pids, resumed_pid])


def test_the_driver_waits_for_a_checkpoint_that_was_reported_after_the_notice(
    tmp_path: Path,
) -> None:
    """An asynchronous report from before the notice does not count, although it commits later."""
    late = """
from distributor.train.storage.checkpoint_store import Storage

def report_before_and_after():
    commit, Storage.commit = Storage.commit, lambda *args: commit_late(commit, *args)
    assert not train.is_preempted()
    save(0, train.CheckpointUploadMode.ASYNC)
    Path(FOLDER, "pid-0-0").write_text(str(os.getpid()))
    while not train.is_preempted():
        pass
    Path(FOLDER, "notified").touch()
    save(1, train.CheckpointUploadMode.SYNC)
    threading.Event().wait()

def commit_late(commit, *args):
    while not Path(FOLDER, "notified").exists():
        pass
    return commit(*args)

def save(step, mode):
    folder = tempfile.mkdtemp()
    Path(folder, "state").write_text(str(step))
    train.report(
        {"step": step}, Checkpoint.from_directory(folder), checkpoint_upload_mode=mode
    )
"""
    source = LOCAL.replace("    3, use_gpu", "    1, use_gpu").replace(
        "run(loop)", "run(report_before_and_after)"
    )
    with driver(tmp_path, late + source) as run:
        run.rank_pids(1)
        run.process.terminate()
        code, output = run.wait()
    assert code == -signal.SIGTERM, output
    assert run.checkpointed_steps() == [0, 1]


def lose_rank_1() -> None:
    rank = train.get_context().get_world_rank()
    assert train.get_preemption_info() is None
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    until(lambda: train.get_preemption_info() is not None, "all ranks are notified", 60)
    info = train.get_preemption_info()
    assert info is not None
    assert (info.preempted_node_ids, info.preempted_ranks) == ([socket.gethostname()], [0, 1])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()


def test_preempted_attempts_are_not_counted_in_max_failures() -> None:
    def be_preempted_and_then_fail() -> None:
        if (attempt := os.environ["TORCHELASTIC_RESTART_COUNT"]) != "0":
            raise ValueError(f"attempt {attempt}")
        lose_rank_1()

    runner = TorchDistributor(
        2, use_gpu=False, max_failures=1, max_preemption_failures=1, timeout=100
    )
    with pytest.raises(ValueError, match="attempt 2") as failed:
        runner.run(be_preempted_and_then_fail)
    preempted = [bool(attempt.preempted) for attempt in failed.value.attempts]  # type: ignore[attr-defined]
    assert preempted == [True, False, False]
    assert any("max_failures is 1" in note for note in failed.value.__notes__)
