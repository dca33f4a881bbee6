"""Whatever ends a run, what its ranks started ends with it; deadlines tell where they stood."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from support.waiting import assert_gone, marked, until
from test_repeated import driver

import distributor
from distributor import RunTimeout, TorchDistributor, WorkerDied
from distributor.node.agent import agent
from distributor.node.process.signals import RESOURCE_TRACKER_SECONDS

cloudpickle.register_pickle_by_value(sys.modules[__name__])
Distribute = Callable[..., TorchDistributor]
RANKS = 2
linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there are no supervisors")


def leave_behind(folder: str) -> None:
    """Start what is hard to catch: sessions of their own, orphans, a segment of shared memory."""
    import subprocess
    from multiprocessing.shared_memory import SharedMemory

    pids = [os.fork()]
    if pids[0] == 0:
        signal.pause()
    pids.append(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
    reader, writer = os.pipe()
    if os.fork() == 0:  # a daemon as of old
        os.setsid()
        daemon = os.fork()
        if daemon == 0:
            signal.pause()
        os.write(writer, str(daemon).encode())
        os._exit(0)
    pids.append(int(os.read(reader, 20)))
    segment = SharedMemory(create=True, size=1000)
    note = Path(folder, os.environ["RANK"])
    note.with_suffix(".part").write_text(json.dumps([segment.name, [os.getpid(), *pids]]))
    note.with_suffix(".part").rename(note.with_suffix(".json"))


def work(folder: str, way: str) -> str:
    leave_behind(folder)
    if way == "raise":
        raise ValueError("on purpose")
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "hang":
        signal.pause()
    return "done"


ENDS: dict[str, type[Exception] | None] = {
    "return": None,
    "raise": ValueError,
    "kill": WorkerDied,
    "hang": RunTimeout,
}


@linux
@pytest.mark.parametrize("way", ENDS)
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "fresh"])
def test_what_ranks_have_started_ends_with_the_run(
    distribute: Distribute, tmp_path: Path, warm: bool, way: str
) -> None:
    runner = distribute(RANKS, warm=warm, timeout=3 if way == "hang" else 120)
    if (error := ENDS[way]) is None:
        assert runner.run(work, str(tmp_path), way) == "done"
    else:
        with pytest.raises(error):
            runner.run(work, str(tmp_path), way)
    assert_nothing_left(tmp_path)


def assert_nothing_left(folder: Path, processes: int | None = None) -> None:
    """Check that all of the ranks has ended, or so many processes of each."""
    notes = [json.loads(note.read_text()) for note in folder.glob("*.json")]
    assert len(notes) == RANKS
    assert_gone(pid for _, pids in notes for pid in pids[:processes])
    segments = [Path("/dev/shm", name) for name, _ in notes]
    until(lambda: not any(segment.exists() for segment in segments), "shared memory is left")


SLOW_PYTHON = """\
#!{python}
import os, pathlib, sys, time
pathlib.Path({begun!r}, str(os.getpid())).touch()
time.sleep({seconds})
os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""


@linux
def test_shared_memory_is_removed_though_its_cleaner_starts_late(
    distribute: Distribute, tmp_path: Path
) -> None:
    slow = tmp_path / "python"
    begun = tmp_path / "begun"
    begun.mkdir()
    text = SLOW_PYTHON.format(
        python=sys.executable, begun=str(begun), seconds=RESOURCE_TRACKER_SECONDS + 1
    )
    slow.write_text(text)
    slow.chmod(0o755)

    def program(folder: str) -> str:
        import multiprocessing.spawn

        multiprocessing.spawn.set_executable(str(slow))
        return work(folder, "return")

    notes = tmp_path / "notes"
    notes.mkdir()
    assert distribute(RANKS, warm=False, timeout=120).run(program, str(notes)) == "done"
    assert_nothing_left(notes)
    cleaners = [int(file.name) for file in begun.iterdir()]
    assert len(cleaners) == RANKS
    assert_gone(cleaners)


DRIVER = """
    import sys
    sys.path.insert(0, sys.argv[1])
    from test_endings import work
    from distributor import TorchDistributor

    warm = sys.argv[3] == "warm"
    runner = TorchDistributor(2, local_mode=True, use_gpu=False, warm=warm)
    runner.run(work, sys.argv[2], "hang")
"""


@linux
@pytest.mark.parametrize("warm", ["warm", "fresh"])
@pytest.mark.parametrize("victim", ["driver", "supervisor", "zygote and supervisor"])
def test_what_ranks_have_started_ends_with_whoever_is_killed(
    tmp_path: Path, victim: str, warm: str
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    here = str(Path(__file__).parent)
    with driver(DRIVER, tmp_path, here, str(notes), warm) as (process, mark):
        until(lambda: len(list(notes.glob("*.json"))) == RANKS, "the ranks run", 60)
        [rank, *_] = json.loads((notes / "0.json").read_text())[1]
        supervisor = psutil.Process(rank).ppid()
        victims = {
            "driver": [process.pid],
            "supervisor": [supervisor],
            "zygote and supervisor": [psutil.Process(supervisor).ppid(), supervisor],
        }[victim]
        if process.pid in victims and victim != "driver":
            pytest.skip("fresh ranks have no zygote")
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        # With nobody above it, a forked daemon, which lacks the variables of the run, is lost.
        assert_nothing_left(notes, processes=3 if victim == "zygote and supervisor" else None)
        if victim == "driver":
            until(lambda: not marked(mark), "processes of the driver are left")


def stand(folder: str) -> None:
    """Stand somewhere, each rank in a way of its own."""
    import ctypes

    def waits() -> None:
        signal.pause()

    def holds_the_lock() -> None:
        ctypes.PyDLL(None).sleep(1000)

    def is_stopped() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    [waits, holds_the_lock, is_stopped, waits][int(os.environ["RANK"])]()


def wait_for(word: str) -> str:
    """Work until a file is there."""
    import time

    print("at work", flush=True)
    while not Path(word).exists():
        time.sleep(0.01)
    return "done"


def test_a_run_that_goes_on_tells_where_its_ranks_stand(
    distribute: Distribute, tmp_path: Path
) -> None:
    word = tmp_path / "word"
    with ThreadPoolExecutor(1) as other:
        run = other.submit(distribute(RANKS, timeout=120).run, wait_for, str(word))
        try:
            until(lambda: all_stand("in wait_for"), "the ranks tell", 60)
            assert not run.done()
        finally:
            word.touch()
        assert run.result() == "done"
    assert distributor.stacks() == {}


def all_stand(where: str) -> bool:
    """Tell whether all ranks of the one run say that they stand there."""
    [stacks] = distributor.stacks().values() or [{}]
    return sorted(stacks) == list(range(RANKS)) and all(where in s for s in stacks.values())


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "fresh"])
def test_a_deadline_tells_where_the_ranks_stood(
    distribute: Distribute, tmp_path: Path, warm: bool
) -> None:
    runner: Any = distribute(4, warm=warm, timeout=2)
    with pytest.raises(RunTimeout) as caught:
        runner.run(stand, str(tmp_path))
    stacks = caught.value.stacks
    assert sorted(stacks) == [0, 1, 2, 3]
    assert "in waits" in stacks[0]
    assert "in holds_the_lock" in stacks[1]
    assert "no answer" in stacks[2]
    assert stacks[0] == stacks[3], "and so it is told once"
    assert "ranks 0, 3:\n" in str(caught.value)
    assert "control_channel" not in str(caught.value)


def never_end() -> None:
    threading.Event().wait()


def test_an_exit_is_told_though_its_handlers_never_end(distribute: Distribute) -> None:
    def program() -> None:
        if os.environ["RANK"] == "0":
            atexit.register(never_end)
            print("about to leave")
            sys.exit(3)
        never_end()

    with pytest.raises(WorkerDied, match="about to leave") as caught:
        distribute(RANKS, timeout=60).run(program)
    assert caught.value.exit_code == 3


def test_a_value_comes_though_its_rank_never_ends(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agent, "TELL_SECONDS", 0.5)
    monkeypatch.setattr(agent, "LEAVE_SECONDS", 1.5)

    def program() -> str:
        threading.Thread(target=never_end).start()
        return "done"

    distributor = TorchDistributor(RANKS, local_mode=True, use_gpu=False, timeout=60)
    assert distributor.run_all(program) == ["done"] * RANKS
    told = capfd.readouterr().err
    for rank in range(RANKS):
        assert f"rank {rank} (local rank {rank})" in told
    assert "has done its work, but its process goes on" in told
    assert "in never_end" in told
