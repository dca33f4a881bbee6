"""Many runs, two at once, and runs that are cut short: each keeps to itself and leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from distributor import RunTimeout, TorchDistributor

SOON = 10.0
"""Seconds within which all processes of a run that was cut short must have ended."""
MARK = "DISTRIBUTOR_TEST_MARK"
Distribute = Callable[..., TorchDistributor]


def until(condition: Callable[[], object], what: str, seconds: float = SOON) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds} s: {what}"
        time.sleep(0.02)


def alive(pids: Iterable[int]) -> list[int]:
    """Tell which of these processes still run; one that nobody has reaped yet has ended."""
    return [pid for pid in pids if _status(pid) not in (None, psutil.STATUS_ZOMBIE)]


def _status(pid: int) -> str | None:
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return None


def marked(mark: str) -> list[int]:
    """List the processes that were started, at any remove, with this mark in their environment."""

    def has_mark(process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == mark
        except (psutil.Error, OSError):
            return False

    return alive(process.pid for process in psutil.process_iter() if has_mark(process))


def assert_gone(pids: Iterable[int]) -> None:
    pids = list(pids)
    assert pids
    until(lambda: not alive(pids), f"still alive are some of {pids}")


MANY_RUNS = """
    import json, os, random, sys, threading

    import psutil

    from distributor import TorchDistributor

    RUNS, TURNS = int(sys.argv[1]), sys.argv[2]


    def train(run, order):
        import atexit, os

        rank = int(os.environ["RANK"])
        turn = order.index(rank)

        def pass_on():
            if turn + 1 < len(order):
                open(os.path.join(TURNS, str(turn + 1)), "w").close()

        if turn:
            open(os.path.join(TURNS, str(turn))).read()  # until the one before passes on
        if rank == 0:
            pass_on()  # it stays to serve the store
        else:
            atexit.register(pass_on)
        return [rank, run]


    def state():
        return [sorted(os.listdir("/proc/self/fd")), threading.active_count(), me.num_threads()]


    me = psutil.Process()
    orders = random.Random(20240229)
    distributor = TorchDistributor(4, local_mode=True, use_gpu=False, timeout=120)
    before = state()
    values, zeros_turns, children = [], [], []
    for run in range(RUNS):
        order = orders.sample(range(4), 4)
        zeros_turns.append(order.index(0))
        values.append(distributor.run(train, run, order))
        children += me.children(recursive=True)
    result = dict(values=values, zeros_turns=zeros_turns, children=list(map(str, children)))
    print(json.dumps({**result, "before": before, "after": state()}))
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
@pytest.mark.parametrize(
    "runs", [12, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_many_runs_whose_ranks_end_in_any_order(run_driver: Any, tmp_path: Path, runs: int) -> None:
    temporary, turns, mark = tmp_path / "temporary", tmp_path / "turns", uuid.uuid4().hex
    temporary.mkdir()
    turns.mkdir()
    for turn in range(1, 4):
        os.mkfifo(turns / str(turn))
    env = {"TMPDIR": str(temporary), MARK: mark}
    done = run_driver(MANY_RUNS, str(runs), str(turns), env=env, timeout=60 + 15 * runs)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["values"] == [[0, run] for run in range(runs)]
    assert set(found["zeros_turns"]) == {0, 1, 2, 3}, "rank 0 ended in each place"
    assert found["children"] == []
    assert found["after"] == found["before"]
    assert os.listdir(temporary) == []
    assert marked(mark) == []


@pytest.mark.spark
def test_two_at_once_do_not_meet(spark: Any, tmp_path: Path) -> None:
    door = str(tmp_path / "door")
    os.mkfifo(door)

    def train(name: str, mode: str) -> tuple[list[Any], dict[str, str]]:
        import os

        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if rank == 0:
            open(door, mode).close()  # opens when the other run's rank 0 is here as well
        total = torch.ones(()) * (rank + 1)
        dist.all_reduce(total)
        told: list[Any] = [None] * world_size
        dist.all_gather_object(told, (name, rank, os.environ["TORCHELASTIC_RUN_ID"]))
        dist.destroy_process_group()
        return told, {"sum": f"{total:.0f}", "mine": os.environ["MINE"]}

    def run(name: str, mode: str, count: int) -> Any:
        distributor = TorchDistributor(
            count,
            local_mode=name == "local",
            use_gpu=False,
            timeout=120,
            env={"MINE": name},
        )
        return distributor.run_all(train, name, mode)

    with ThreadPoolExecutor(2) as pool:
        here, there = pool.submit(run, "local", "w", 3), pool.submit(run, "cluster", "r", 2)
        for future, name, count, total in [(here, "local", 3, "6"), (there, "cluster", 2, "3")]:
            results = future.result(timeout=150)
            assert len(results) == count
            for told, own in results:
                assert [(who, rank) for who, rank, _ in told] == [(name, r) for r in range(count)]
                assert own == {"sum": total, "mine": name}
    assert here.result()[0][0][0][2] != there.result()[0][0][0][2], "each has its own run id"


def test_timeout_names_the_busy_ranks_and_leaves_none(
    distribute: Distribute, tmp_path: Path
) -> None:
    pids, seconds = str(tmp_path), 6

    def train() -> None:
        import os
        import threading

        rank = os.environ["RANK"]
        with open(os.path.join(pids, rank), "w") as file:
            file.write(str(os.getpid()))
        if rank in ("0", "3"):
            threading.Event().wait()

    with pytest.raises(RunTimeout, match="timeout") as caught:
        distribute(4, timeout=seconds).run(train)
    began = min(path.stat().st_mtime for path in tmp_path.iterdir())
    assert time.time() - began < seconds + SOON
    busy = str(caught.value).partition("Still busy: ")[2]
    assert re.findall(r"rank (\d)", re.sub("local rank", "", busy)) == ["0", "3"]
    assert_gone(int(path.read_text()) for path in tmp_path.iterdir())


@contextmanager
def driver(source: str, folder: Path, *args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a driver to be signalled; at the end kill it and whatever it has left behind."""
    script, mark = folder / "driver.py", uuid.uuid4().hex
    script.write_text(textwrap.dedent(source))
    process = subprocess.Popen(
        [sys.executable, str(script), *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, MARK: mark},
        text=True,
        cwd=folder,
    )
    too_late = threading.Timer(150, process.kill)
    too_late.start()
    try:
        yield process, mark
    finally:
        too_late.cancel()
        process.kill()
        process.communicate()
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)


def told_pids(process: subprocess.Popen[str], count: int) -> list[int]:
    """Read the process ids that so many ranks print."""
    assert process.stdout
    pids: list[int] = []
    for line in process.stdout:
        if found := re.search(r"pid (\d+)", line):
            pids.append(int(found.group(1)))
        if len(pids) == count:
            return pids
    raise AssertionError(f"the driver ended after telling {pids}")


HANGING_RUNS = """
    import signal, sys

    from distributor import TorchDistributor


    def hang():
        import os, threading

        print("pid", os.getpid())
        threading.Event().wait()


    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.argv[1] == "cluster":
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master("local-cluster[2,1,1024]")
        builder.config("spark.ui.enabled", "false").config("spark.log.level", "OFF").getOrCreate()
    distributor = TorchDistributor(2, local_mode=sys.argv[1] == "local", use_gpu=False)
    while True:
        try:
            distributor.run(hang)
        except KeyboardInterrupt:
            print("KeyboardInterrupt", flush=True)
"""


@pytest.mark.parametrize("launcher", ["local", pytest.param("cluster", marks=pytest.mark.spark)])
def test_ctrl_c_and_the_drivers_death_end_the_ranks(tmp_path: Path, launcher: str) -> None:
    with driver(HANGING_RUNS, tmp_path, launcher) as (process, mark):
        assert process.stdout
        first = told_pids(process, 2)
        process.send_signal(signal.SIGINT)
        assert_gone(first)
        assert "KeyboardInterrupt\n" in iter(process.stdout.readline, "")
        second = told_pids(process, 2)  # the driver lives, and can go on
        assert process.poll() is None
        assert not set(first) & set(second)
        process.kill()
        assert_gone(second)
        until(lambda: not marked(mark), "processes of the driver are left")


@pytest.mark.parametrize("fails", [False, True])
def test_what_ranks_have_started_goes_with_them(
    distribute: Distribute, tmp_path: Path, fails: bool
) -> None:
    pids = str(tmp_path)

    def train() -> str:
        import os
        import signal
        import subprocess
        import sys

        forked = os.fork()
        if forked == 0:
            signal.pause()
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        with open(os.path.join(pids, os.environ["RANK"]), "w") as file:
            file.write(f"{os.getpid()} {forked} {child.pid}")
        if fails:
            raise ValueError("on purpose")
        return "done"

    if fails:
        with pytest.raises(ValueError, match="on purpose"):
            distribute(2).run(train)
    else:
        assert distribute(2).run(train) == "done"
    family = [int(pid) for path in tmp_path.iterdir() for pid in path.read_text().split()]
    assert len(family) == 6
    assert_gone(family)


def test_a_rank_that_ignores_sigterm_is_killed(distribute: Distribute, tmp_path: Path) -> None:
    fifo, pid = str(tmp_path / "ready"), tmp_path / "pid"
    os.mkfifo(fifo)
    path = str(pid)

    def train() -> None:
        import os
        import signal
        import threading

        if os.environ["RANK"] == "1":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with open(path, "w") as file:
                file.write(str(os.getpid()))
            open(fifo, "w").close()
            threading.Event().wait()
        open(fifo).read()  # until the other ignores the signal
        raise ValueError("on purpose")

    began = time.monotonic()
    with pytest.raises(ValueError, match="on purpose") as caught:
        distribute(2).run(train)
    assert list(caught.value.rank_failures) == [0]  # type: ignore[attr-defined]
    assert time.monotonic() - began < 60
    assert_gone([int(pid.read_text())])


def test_rank_0_serves_the_store_until_all_have_ended(
    distribute: Distribute, tmp_path: Path
) -> None:
    fifos = [str(tmp_path / f"returned-{rank}") for rank in (1, 2)]
    for fifo in fifos:
        os.mkfifo(fifo)

    class Told:
        """A value that tells when it is pickled: its function has returned by then."""

        def __reduce__(self) -> tuple[Any, ...]:
            for fifo in fifos:
                open(fifo, "w").close()
            return str, ("rank 0",)

    def train() -> Any:
        import os
        import time
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
        rank = dist.get_rank()
        others = dist.new_group([1, 2])
        if rank == 0:
            return Told()
        open(fifos[rank - 1]).read()  # until rank 0 has returned
        time.sleep(1.5)  # slow work, meanwhile a rank 0 that does not wait would be gone
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))
        store.set(f"late-{rank}", str(rank))
        assert store.get(f"late-{3 - rank}") == str(3 - rank).encode()
        again = dist.new_group([1, 2], use_local_synchronization=True)
        total = torch.ones(()) * rank
        for group in (others, again):
            dist.all_reduce(total, group=group)
        return total.item()

    assert distribute(3).run_all(train) == ["rank 0", 6.0, 6.0]
