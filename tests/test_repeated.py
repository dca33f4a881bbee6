"""Many runs, and concurrent runs, are independent and leave nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from conftest import cluster_is_slow, facts_in
from support.ranks import Distribute
from support.waiting import MARK, assert_gone, marked, until

from distributor import TorchDistributor

MANY_RUNS = """
    import gc, json, os, sys, tempfile, threading

    import psutil

    sys.path.append(sys.argv[2])
    from support.waiting import comes_true
    from distributor import TorchDistributor, warm_up


    def train(run):
        import os, time

        rank = int(os.environ["RANK"])
        time.sleep((run + rank) % 4 / 100)  # ranks end in another order each time
        return [rank, run]


    def state():
        return {
            "descriptors": sorted(os.listdir("/proc/self/fd")),
            "threads": [threading.active_count(), me.num_threads()],
            "processes": [child.pid for child in me.children(recursive=True)],
            "files": os.listdir(tempfile.gettempdir()),
        }


    def sizes():
        gc.collect()
        return {
            "objects": sys.getallocatedblocks(),
            "memory": me.memory_info().rss,
            "zygote's descriptors": zygote.num_fds(),
        }


    me, runs = psutil.Process(), int(sys.argv[1])
    distributor = TorchDistributor(4, local_mode=True, use_gpu=False, timeout=120)
    warm_up(distributor)
    [zygote] = me.children()
    before = state()
    for run in range(runs):
        assert distributor.run(train, run) == [0, run]
        if run == runs // 10:
            small = sizes()
    # The last supervisor has done its work, but the kernel may still be freeing its memory.
    comes_true(lambda: state() == before, 10)
    grown = {of: size - small[of] for of, size in sizes().items()}
    print("FACTS " + json.dumps({"before": before, "after": state(), "grown": grown}))
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
@pytest.mark.parametrize(
    "runs", [12, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(2400)])]
)
def test_many_runs_leave_nothing(run_driver: Any, tmp_path: Path, runs: int) -> None:
    temporary, mark = tmp_path / "temporary", uuid.uuid4().hex
    temporary.mkdir()
    segments = set(os.listdir("/dev/shm"))
    # With one arena: glibc gives new threads further ones, up to eight per core, and keeps them.
    env = {"TMPDIR": str(temporary), MARK: mark, "MALLOC_ARENA_MAX": "1"}
    here = str(Path(__file__).parent)
    facts = facts_in(run_driver(MANY_RUNS, str(runs), here, env=env, timeout=2 * runs + 60))
    assert facts["after"] == facts["before"]
    # The objects in use are exact. What the process holds grows in steps that no run keeps: an
    # arena of Python has 1 MiB, and its table of interned strings doubles once.
    assert facts["grown"]["objects"] < 500
    assert facts["grown"]["memory"] < 4 * 2**20
    assert facts["grown"]["zygote's descriptors"] < 5, "at most those of one run that is ending"
    assert os.listdir(temporary) == []
    until(lambda: not marked(mark), "processes of the driver are left")
    # Other programs on this machine may create segments, too.
    assert len(set(os.listdir("/dev/shm")) - segments) < runs, "shared memory is left"


@pytest.mark.spark(shared=True)
@pytest.mark.parametrize("other_is_local", [True, False], ids=["local-cluster", "cluster-cluster"])
def test_two_concurrent_runs_are_independent(
    spark: Any, tmp_path: Path, other_is_local: bool
) -> None:
    door = str(tmp_path / "door")
    os.mkfifo(door)

    def train(name: str, mode: str) -> tuple[float, list[Any], str]:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            open(door, mode).close()  # opens when the other run's rank 0 is here as well
        total = torch.ones(()) * (dist.get_rank() + 1)
        dist.all_reduce(total)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (name, dist.get_rank(), os.environ["MINE"]))
        return total.item(), gathered, os.environ["TORCHELASTIC_RUN_ID"]

    def run(name: str, mode: str, local_mode: bool) -> Any:
        settings: Any = {"use_gpu": False, "timeout": 120, "env": {"MINE": name}}
        return TorchDistributor(2, local_mode=local_mode, **settings).run_all(train, name, mode)

    ids = set()
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(run, ("one", "other"), "wr", (False, other_is_local), timeout=150))
    for name, results in zip(("one", "other"), both, strict=True):
        for total, gathered, run_id in results:
            assert (total, gathered) == (3, [(name, rank, name) for rank in range(2)])
            ids.add(run_id)
    assert len(ids) == 2, "each has its own run id"


@cluster_is_slow
def test_a_rank_that_ignores_sigterm_is_killed(distribute: Distribute, tmp_path: Path) -> None:
    fifo, pid = str(tmp_path / "ready"), tmp_path / "pid"
    os.mkfifo(fifo)

    def train() -> None:
        if os.environ["RANK"] == "1":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            pid.write_text(str(os.getpid()))
            open(fifo, "w").close()
            threading.Event().wait()
        open(fifo).read()  # until the other ignores the signal
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose") as caught:
        distribute(2).run(train)
    assert list(caught.value.rank_failures) == [0]  # type: ignore[attr-defined]
    assert_gone([int(pid.read_text())])


@cluster_is_slow
def test_rank_0_serves_the_store_until_all_have_ended(
    distribute: Distribute, tmp_path: Path
) -> None:
    fifo = str(tmp_path / "returned")
    os.mkfifo(fifo)

    class Signalling:
        """A value that signals when it is pickled, after its function has returned."""

        def __reduce__(self) -> tuple[Any, ...]:
            open(fifo, "w").close()
            return str, ("rank 0",)

    def train() -> Any:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            return Signalling()
        open(fifo).read()  # until rank 0 has returned
        threading.Event().wait(1.5)  # slow work, during which a rank 0 that does not wait would end
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))
        store.set("late", "1")
        return store.get("late")

    assert distribute(2).run_all(train) == ["rank 0", b"1"]
