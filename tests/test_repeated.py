"""Many runs, concurrent runs and interrupted runs are independent and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import cluster_is_slow, facts_in
from support.driver_process import driver, read_pids
from support.waiting import MARK, SOON, assert_gone, marked, until

from distributor import RunTimeout, TorchDistributor

Distribute = Callable[..., TorchDistributor]
KIB, MIB = 2**10, 2**20

MANY_RUNS = """
    import ctypes, gc, json, os, random, sys, tempfile, threading

    import psutil

    RUNS, TURNS = int(sys.argv[1]), sys.argv[2]
    sys.path.append(sys.argv[3])
    from support.waiting import comes_true
    from distributor import TorchDistributor, warm_up


    def train(run, order):
        import atexit, os

        rank = int(os.environ["RANK"])
        turn = order.index(rank)

        def pass_on():
            if turn + 1 < len(order):
                open(os.path.join(TURNS, str(turn + 1)), "w").close()

        if turn:
            open(os.path.join(TURNS, str(turn))).read()  # until the rank before is done
        if rank == 0:
            pass_on()  # rank 0 stays to serve the store
        else:
            atexit.register(pass_on)
        return [rank, run]


    def state():
        return {
            "descriptors": sorted(os.listdir("/proc/self/fd")),
            "threads": [threading.active_count(), me.num_threads()],
            "processes": [child.pid for child in me.children(recursive=True)],
            "files": os.listdir(tempfile.gettempdir()),
        }


    class Malloc(ctypes.Structure):  # glibc's struct mallinfo2
        names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Malloc


    def sizes():
        gc.collect()
        return {
            "objects": sys.getallocatedblocks(),
            "allocated": mallinfo().uordblks,
            "memory": me.memory_info().rss,
            "zygote's descriptors": zygote.num_fds(),
        }


    me = psutil.Process()
    orders = random.Random(20240229)
    distributor = TorchDistributor(4, local_mode=True, use_gpu=False, timeout=120)
    warm_up(distributor)
    [zygote] = me.children()
    before, zeros_turns = state(), set()
    for run in range(RUNS):
        order = orders.sample(range(4), 4)
        assert distributor.run(train, run, order) == [0, run]
        zeros_turns.add(order.index(0))
        if run == RUNS // 10:
            small = sizes()
    # The last supervisor has done its work, but the kernel may still be freeing its memory.
    comes_true(lambda: state() == before, 10)
    grown = {of: size - small[of] for of, size in sizes().items()}
    facts = {"before": before, "after": state(), "grown": grown, "turns": sorted(zeros_turns)}
    print("FACTS " + json.dumps(facts))
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
@pytest.mark.parametrize(
    "runs", [12, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(2400)])]
)
def test_many_runs_whose_ranks_end_in_any_order(run_driver: Any, tmp_path: Path, runs: int) -> None:
    temporary, turns, mark = tmp_path / "temporary", tmp_path / "turns", uuid.uuid4().hex
    temporary.mkdir()
    turns.mkdir()
    for turn in range(1, 4):
        os.mkfifo(turns / str(turn))
    segments = set(os.listdir("/dev/shm"))
    here = str(Path(__file__).parent)
    # With one arena: glibc gives new threads further ones, up to eight per core, and keeps them.
    env = {"TMPDIR": str(temporary), MARK: mark, "MALLOC_ARENA_MAX": "1"}
    facts = facts_in(
        run_driver(MANY_RUNS, str(runs), str(turns), here, env=env, timeout=2 * runs + 60)
    )
    assert facts["turns"] == [0, 1, 2, 3], "rank 0 ended in each place"
    assert facts["after"] == facts["before"]
    # What is in use is exact. What the process holds grows in steps that no run keeps: an arena of
    # Python has 1 MiB, and its table of interned strings doubles once, after about 800 runs.
    assert facts["grown"]["objects"] < 500
    assert facts["grown"]["allocated"] < 64 * KIB
    assert facts["grown"]["memory"] < 4 * MIB
    assert facts["grown"]["zygote's descriptors"] < 5, "at most those of one run that is ending"
    assert os.listdir(temporary) == []
    until(lambda: not marked(mark), "processes of the driver are left")
    # Other programs on this machine may create segments, too.
    assert len(set(os.listdir("/dev/shm")) - segments) < runs, "shared memory is left"


SIZES = {"local": 3, "cluster": 2}
"""How many ranks each run has; two runs must fit on the cluster at once."""


@pytest.mark.parametrize(
    "launchers",
    [
        ("local", "local"),
        pytest.param(("local", "cluster"), marks=pytest.mark.spark(shared=True)),
        pytest.param(("cluster", "cluster"), marks=pytest.mark.spark(shared=True)),
    ],
    ids="-".join,
)
def test_two_concurrent_runs_are_independent(
    request: pytest.FixtureRequest, tmp_path: Path, launchers: tuple[str, str]
) -> None:
    if "cluster" in launchers:
        request.getfixturevalue("spark")
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
        gathered: list[Any] = [None] * world_size
        dist.all_gather_object(gathered, (name, rank, os.environ["TORCHELASTIC_RUN_ID"]))
        dist.destroy_process_group()
        return gathered, {"sum": f"{total:.0f}", "mine": os.environ["MINE"]}

    def run(name: str, mode: str, launcher: str) -> Any:
        distributor = TorchDistributor(
            SIZES[launcher],
            local_mode=launcher == "local",
            use_gpu=False,
            timeout=120,
            env={"MINE": name},
        )
        return distributor.run_all(train, name, mode)

    ids: set[str] = set()
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(run, ("one", "other"), "wr", launchers, timeout=150))
    for name, launcher, results in zip(("one", "other"), launchers, both, strict=True):
        count = SIZES[launcher]
        assert len(results) == count
        for gathered, own in results:
            assert [(who, rank) for who, rank, _ in gathered] == [(name, r) for r in range(count)]
            assert own == {"sum": str(sum(range(1, count + 1))), "mine": name}
            ids.update(run_id for *_, run_id in gathered)
    assert len(ids) == 2, "each has its own run id"


def test_ranks_of_later_runs_have_the_same_zygotes(distribute: Distribute) -> None:
    def grandparent() -> int:
        with open(f"/proc/{os.getppid()}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])

    distributor = distribute(4, warm=True)
    zygotes = [set(distributor.run_all(grandparent)) for _ in range(3)]
    assert zygotes[0] == zygotes[1] == zygotes[2]
    assert os.getpid() not in zygotes[0]
    owners = 1 if distributor.local_mode else 2
    assert len(zygotes[0]) == owners, "one for this process, or for each executor"


@pytest.mark.slow
@pytest.mark.spark
def test_zygotes_on_executors_end_with_the_session(run_driver: Any) -> None:
    done = run_driver(
        """
        import json, os, select

        from pyspark.sql import SparkSession

        from distributor import TorchDistributor, warm_up

        builder = SparkSession.builder.master("local-cluster[2,1,1024]")
        spark = builder.config("spark.ui.enabled", "false").getOrCreate()
        ranks = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=60)

        def grandparent():
            with open(f"/proc/{os.getppid()}/stat") as stat:
                return int(stat.read().rpartition(")")[2].split()[1])

        zygotes = ranks.run_all(grandparent)
        commands = [open(f"/proc/{pid}/cmdline").read() for pid in zygotes]
        ends = [os.pidfd_open(pid) for pid in zygotes]
        spark.stop()
        ended = [bool(select.select([end], [], [], 30)[0]) for end in ends]
        print("FACTS " + json.dumps({"commands": commands, "ended": ended}))
        """
    )
    facts = facts_in(done)
    assert all("zygote" in command for command in facts["commands"])
    assert facts["ended"] == [True, True]


def test_timeout_names_the_busy_ranks_and_leaves_none(
    distribute: Distribute, tmp_path: Path
) -> None:
    pids, seconds = str(tmp_path), 6

    def train() -> None:
        import os

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


@cluster_is_slow
def test_timeout_counts_from_when_the_ranks_have_started(
    distribute: Distribute, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(5)")
    distributor = distribute(2, timeout=3, env={"PYTHONPATH": str(tmp_path)})

    def train() -> str:
        return "in time"

    assert distributor.run_all(train) == ["in time", "in time"]


HANGING_RUNS = """
    import sys

    from distributor import TorchDistributor, warm_up


    def hang():
        import os, threading

        print("pid", os.getpid())
        threading.Event().wait()


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


@pytest.mark.parametrize(
    "launcher", ["local", pytest.param("cluster", marks=[pytest.mark.slow, pytest.mark.spark])]
)
def test_ctrl_c_and_the_drivers_death_end_the_ranks(tmp_path: Path, launcher: str) -> None:
    with driver(HANGING_RUNS, tmp_path, launcher) as (process, mark):
        assert process.stdout
        first = read_pids(process, 2)
        process.send_signal(signal.SIGINT)
        assert_gone(first)
        assert "KeyboardInterrupt\n" in iter(process.stdout.readline, "")
        second = read_pids(process, 2)  # the driver still runs, and can launch again
        assert process.poll() is None
        assert not set(first) & set(second)
        process.kill()
        assert_gone(second)
        until(lambda: not marked(mark), "processes of the driver are left")


@pytest.mark.parametrize("fails", [False, True])
@cluster_is_slow
def test_processes_that_ranks_have_started_end_with_them(
    distribute: Distribute, tmp_path: Path, fails: bool
) -> None:
    pids = str(tmp_path)

    def train() -> str:
        import os
        import signal

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

    class Signalling:
        """A value that signals when it is pickled, after its function has returned."""

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
            return Signalling()
        open(fifos[rank - 1]).read()  # until rank 0 has returned
        time.sleep(1.5)  # slow work, during which a rank 0 that does not wait would exit
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
