"""A process is about to end: all ranks are told at one step, and have a chance to report."""

from __future__ import annotations

import os
import signal
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
from distributor.node.worker.worker_context import worker_context
from distributor.train import Result
from distributor.train.runtime import preemption
from distributor.train.runtime.preemption import NoticeTracker

cloudpickle.register_pickle_by_value(sys.modules[__name__])

BEGIN = """
import os, signal, sys, tempfile, threading
from pathlib import Path
from distributor import TorchDistributor, train
from distributor.train import Checkpoint

FOLDER, HEEDS, STEPS = sys.argv[1], sys.argv[2] == "heeds", int(sys.argv[3])


def loop():
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    rank, told = dist.get_rank(), torch.zeros(1)
    begun = train.get_checkpoint()
    first = int(Path(begun.path, "rank0.txt").read_text()) + 1 if begun else 0
    for step in range(first, STEPS):
        due = HEEDS and train.is_preempted()
        told[0] = float(due)
        dist.all_reduce(told)
        assert told.item() in (0, dist.get_world_size()), "all ranks or none"
        if due:
            print("told at", step, signal.getsignal(signal.SIGTERM), flush=True)
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, f"rank{rank}.txt").write_text(str(step))
                train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder))
        if step == first + 20:
            Path(FOLDER, f"up{rank}-{int(first > 0)}").write_text(str(os.getpid()))
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
    warm=False,  # so that a rank is a descendant of its executor
)
print("returned", distributor.run(loop), flush=True)
"""
FOR_EVER, SOME = 10**9, 4000


class Run:
    """A driver in a process of its own, and its ranks."""

    def __init__(self, folder: Path, process: subprocess.Popen[str], mark: str) -> None:
        self.folder, self.process, self.mark = folder, process, mark

    def ranks(self, count: int, again: bool = False) -> list[int]:
        """Wait until the ranks are some steps into their work; give their processes."""
        files = [self.folder / f"up{rank}-{int(again)}" for rank in range(count)]
        until(lambda: all(f.exists() and f.read_text() for f in files), "the ranks work", 100)
        return [int(file.read_text()) for file in files]

    def end(self) -> tuple[int, str]:
        """Wait for its end; give its code and what it printed."""
        output, _ = self.process.communicate(timeout=100)
        until(lambda: not marked(self.mark), "processes of the driver are left")
        return self.process.returncode, output

    def checkpoints(self) -> list[int]:
        return [told["step"] for _, told in Result.from_path(self.folder / "run").best_checkpoints]


@contextmanager
def driver(folder: Path, source: str, heeds: bool = True, steps: int = FOR_EVER) -> Iterator[Run]:
    script, mark = folder / "driver.py", uuid.uuid4().hex
    script.write_text(BEGIN + source)
    words = [str(folder), "heeds" if heeds else "is deaf", str(steps)]
    with subprocess.Popen(
        [sys.executable, str(script), *words],
        env={**os.environ, MARK: mark, "PYSPARK_PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield Run(folder, process, mark)
        finally:
            for left in marked(mark):
                left.kill()


def executor_of(rank: int) -> psutil.Process:
    (executor, *_) = [
        parent
        for parent in psutil.Process(rank).parents()
        if "CoarseGrainedExecutorBackend" in " ".join(parent.cmdline())
    ]
    return executor


def told_at(output: str) -> set[int]:
    lines = [line.partition("told at ")[2].split() for line in output.splitlines()]
    return {int(words[0]) for words in lines if words}


def test_a_driver_that_is_asked_to_end_waits_for_a_checkpoint(tmp_path: Path) -> None:
    with driver(tmp_path, LOCAL) as run:
        ranks = run.ranks(3)
        run.process.terminate()
        code, output = run.end()
    assert code == -signal.SIGTERM, output
    assert "Received SIGTERM: the ranks are notified, and this process ends once" in output
    (step,) = told_at(output)
    assert run.checkpoints() == [step]
    assert "returned" not in output
    assert_gone(ranks)


def test_ranks_that_heed_no_notice_end_with_the_driver_at_once(tmp_path: Path) -> None:
    with driver(tmp_path, LOCAL, heeds=False) as run:
        ranks = run.ranks(3)
        run.process.terminate()
        code, output = run.end()
    assert code == -signal.SIGTERM, output
    assert "SIGTERM" not in output
    assert_gone(ranks)


def test_a_rank_outlives_one_sigterm_and_the_run_the_next(tmp_path: Path) -> None:
    with driver(tmp_path, LOCAL, steps=FOR_EVER) as run:
        ranks = run.ranks(3)
        os.kill(ranks[1], signal.SIGTERM)
        until(run.checkpoints, "a checkpoint")
        os.kill(ranks[1], signal.SIGTERM)
        others = run.ranks(3, again=True)
        run.process.terminate()
        code, output = run.end()
    assert code == -signal.SIGTERM, output
    assert "was killed by SIGTERM" in output, "the first attempt"
    assert set(run.checkpoints()) == told_at(output)
    assert len(run.checkpoints()) == 2, "the second attempt went on from the first's"
    assert_gone([*ranks, *others])


def test_what_ends_in_time_returns_and_the_process_ends_all_the_same(tmp_path: Path) -> None:
    source = LOCAL.replace("run(loop)", "run(ends_when_told)") + "print('not here')"
    source = (
        """
def ends_when_told():
    assert not train.is_preempted()
    Path(FOLDER, f"up{os.environ['RANK']}-0").write_text(str(os.getpid()))
    while not train.is_preempted():
        pass
    return "told"
"""
        + source
    )
    with driver(tmp_path, source) as run:
        run.ranks(3)
        run.process.terminate()
        code, output = run.end()
    assert code == -signal.SIGTERM, output
    assert "Received SIGTERM: the ranks are notified, and this process ends once" in output
    assert "not here" not in output


@pytest.mark.spark
def test_ranks_on_an_executor_that_is_decommissioned_are_told(tmp_path: Path) -> None:
    with driver(tmp_path, CLUSTER) as run:
        ranks = run.ranks(2)
        executor = executor_of(ranks[1])
        executor.send_signal(signal.SIGPWR)
        until(run.checkpoints, "a checkpoint", 60)
        (first,) = run.checkpoints()
        executor.kill()  # as whoever announced it does in the end
        (other,) = run.ranks(1, again=True)
        assert executor_of(other) != executor
        run.process.terminate()
        code, output = run.end()
    assert code == -signal.SIGTERM, output
    assert "Spark is about to end executor " in output
    assert "Starting the next attempt" in output
    assert first in told_at(output), "all ranks were told at one step, and none lost"
    assert run.checkpoints()[0] == first
    assert len(run.checkpoints()) == 2, "of the next attempt, which had its own notice"
    assert_gone([*ranks, other])


def test_between_attempts_there_is_nobody_to_tell(tmp_path: Path) -> None:
    """Ranks that fail meet a listener, which has this process asked to end just then."""
    source = LOCAL.replace("max_failures=1, ", "max_failures=3, listeners=[Asks()], ")
    asks = """
from distributor import Listener

class Asks(Listener):
    def failed(self, attempt, error):
        print("attempt", attempt, "failed", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

def fails_when_heeding():
    assert not train.is_preempted()
    raise ValueError(train.get_context().get_world_rank())
"""
    with driver(tmp_path, asks + source.replace("run(loop)", "run(fails_when_heeding)")) as run:
        code, output = run.end()
    assert code == -signal.SIGTERM, output
    assert "attempt 0 failed" in output
    assert "attempt 1" not in output


def test_an_attempt_that_fails_when_told_is_the_last(tmp_path: Path) -> None:
    fails = """
def fails_when_told():
    assert not train.is_preempted()
    Path(FOLDER, f"up{os.environ['RANK']}-0").write_text(str(os.getpid()))
    while not train.is_preempted():
        pass
    raise ValueError("cannot be saved")
"""
    with driver(tmp_path, fails + LOCAL.replace("run(loop)", "run(fails_when_told)")) as run:
        run.ranks(3)
        run.process.terminate()
        code, output = run.end()
    assert code == -signal.SIGTERM, output
    assert output.count("Started local training") == 1
    assert "cannot be saved" in output


def test_what_was_reported_before_ranks_were_told_is_not_what_is_waited_for(
    tmp_path: Path,
) -> None:
    """A report in the background, which commits after the notice: the next one is newer."""
    late = """
from distributor.train.storage.checkpoint_store import Storage

def reports_late():
    commit, Storage.commit = Storage.commit, lambda *args: wait(commit, *args)
    assert not train.is_preempted()
    save(0, train.CheckpointUploadMode.ASYNC)
    Path(FOLDER, "up0-0").write_text(str(os.getpid()))
    while not train.is_preempted():
        pass
    Path(FOLDER, "told").touch()
    save(1, train.CheckpointUploadMode.SYNC)
    threading.Event().wait()

def wait(commit, *args):
    while not Path(FOLDER, "told").exists():
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
        "run(loop)", "run(reports_late)"
    )
    with driver(tmp_path, late + source) as run:
        run.ranks(1)
        run.process.terminate()
        code, output = run.end()
    assert code == -signal.SIGTERM, output
    assert run.checkpoints() == [0, 1]


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_hears_too_late_is_told_no_more_than_the_others(
    tmp_path: Path, late: int
) -> None:
    waited = tmp_path / "waited"

    def subscribe() -> list[bool]:
        preemption.AGREEMENT_TIMEOUT_SECONDS = 1.0
        rank = train.get_context().get_world_rank()
        told = [train.is_preempted()]
        if rank == late:
            until(waited.exists, "the other has waited in vain", 60)
        worker_context().preemption_notices.notify()
        told += [train.is_preempted() for _ in range(3)]
        waited.touch()
        return told

    told = TorchDistributor(2, use_gpu=False, timeout=120).run_all(subscribe)
    assert told == [[False] * 4] * 2


def test_a_notice_of_each_rank_is_told_at_one_call() -> None:
    def subscribe() -> list[bool]:
        rank = train.get_context().get_world_rank()
        told = [train.is_preempted() for _ in range(3 * rank)]
        worker_context().preemption_notices.notify()
        return told + [train.is_preempted() for _ in range(10 - 3 * rank)]

    told = TorchDistributor(3, use_gpu=False, timeout=120).run_all(subscribe)
    assert told == [[False] * 6 + [True] + [False] * 3] * 3


def test_a_process_that_a_rank_starts_is_none() -> None:
    ask = "from distributor import train; print(train.is_preempted(), train.is_preempted())"

    def start() -> str:
        told = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
        return told.stdout + told.stderr

    assert TorchDistributor(1, use_gpu=False, timeout=60).run(start) == "False False\n"


def test_a_notice_is_told_at_one_call_however_far_each_rank_is() -> None:
    """Three ranks call as they like, one of them ahead; two notices come, each once to all."""
    calls, met = [5, 9, 7], threading.Barrier(3, timeout=30)
    said: list[list[int]] = [[], []]
    lock, complete = threading.Lock(), [threading.Event(), threading.Event()]

    def agree(number: int, begun: int) -> int:
        with lock:
            said[number].append(begun)
            if len(said[number]) == 3:
                complete[number].set()
        assert complete[number].wait(30)
        return max(said[number]) + 1

    heard: list[list[int]] = [[], [], []]

    def be(rank: int) -> None:
        notices = NoticeTracker(agree)
        done = [notices.is_due() for _ in range(calls[rank])]
        notices.receive()
        done += [notices.is_due() for _ in range(10 - calls[rank] + 1)]
        met.wait()
        notices.receive()
        done += [notices.is_due() for _ in range(5)]
        heard[rank] = [number for number, due in enumerate(done, 1) if due]

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert heard == [[10, 12]] * 3


def test_outside_a_run_nothing_is_told() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert not train.is_preempted()
    assert signal.getsignal(signal.SIGTERM) == before
