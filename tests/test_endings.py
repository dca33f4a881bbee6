"""Processes that ranks started end with the run, however it ends; deadlines report stacks."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from conftest import cluster_is_slow
from support.driver_process import driver
from support.ranks import Distribute, wait_until
from support.waiting import assert_gone, marked, until

import distributor
from distributor import RunTimeout, TorchDistributor, WorkerDied
from distributor.control.waiting import GracefulShutdown, Interrupts
from distributor.node.agent import agent

cloudpickle.register_pickle_by_value(sys.modules[__name__])
RANKS = 2
linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no supervisors")


def leave_behind(folder: str) -> None:
    """Start what is hard to clean up: new sessions, orphans, and a segment of shared memory."""
    import subprocess
    from multiprocessing.shared_memory import SharedMemory

    reader, writer = os.pipe()
    if os.fork() == 0:  # a classic daemon
        os.setsid()
        daemon = os.fork()
        if daemon == 0:
            signal.pause()
        os.write(writer, str(daemon).encode())
        os._exit(0)
    segment = SharedMemory(create=True, size=1000)  # its tracker ends after the child below
    child = os.fork()
    if child == 0:
        signal.pause()
    session = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    pids = [child, session.pid, int(os.read(reader, 20))]
    note = Path(folder, os.environ["RANK"])
    note.with_suffix(".part").write_text(json.dumps([segment.name, [os.getpid(), *pids]]))
    note.with_suffix(".part").rename(note.with_suffix(".json"))


def work(folder: str, ending: str) -> str:
    leave_behind(folder)
    # The run stops the other rank as soon as one ends.
    wait_until(lambda: len([*Path(folder).glob("*.json")]) == RANKS, "all ranks have notes")
    if ending == "raise":
        raise ValueError("on purpose")
    if ending == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "hang":
        signal.pause()
    return "done"


ENDINGS: dict[str, type[Exception] | None] = {
    "return": None,
    "raise": ValueError,
    "kill": WorkerDied,
    "hang": RunTimeout,
}


on_cluster, also_on_cluster = [pytest.mark.spark], [pytest.mark.spark, pytest.mark.slow]


@linux
@pytest.mark.parametrize(
    ("distribute", "warm", "ending"),
    [
        ("local", True, "raise"),
        ("local", True, "kill"),
        ("local", True, "hang"),
        ("local", False, "return"),
        pytest.param("cluster", True, "kill", marks=on_cluster),
        pytest.param("cluster", True, "return", marks=also_on_cluster),
        pytest.param("cluster", False, "raise", marks=also_on_cluster),
        pytest.param("cluster", False, "hang", marks=also_on_cluster),
    ],
    indirect=["distribute"],
)
def test_processes_that_ranks_started_end_with_the_run(
    distribute: Distribute, tmp_path: Path, warm: bool, ending: str
) -> None:
    runner = distribute(RANKS, warm=warm, timeout=3 if ending == "hang" else 120)
    if (error := ENDINGS[ending]) is None:
        assert runner.run(work, str(tmp_path), ending) == "done"
    else:
        with pytest.raises(error):
            runner.run(work, str(tmp_path), ending)
    assert_nothing_left(tmp_path)


def assert_nothing_left(folder: Path, processes: int | None = None) -> None:
    """Check that all processes of the ranks have ended, or the first so many of each rank."""
    notes = [json.loads(note.read_text()) for note in folder.glob("*.json")]
    assert len(notes) == RANKS
    assert_gone(pid for _, pids in notes for pid in pids[:processes])
    segments = [Path("/dev/shm", name) for name, _ in notes]
    until(lambda: not any(segment.exists() for segment in segments), "shared memory is left")


HERE = str(Path(__file__).parent)
DRIVER = """
    import sys
    sys.path.insert(0, sys.argv[1])
    from test_endings import work
    from distributor import TorchDistributor

    runner = TorchDistributor(2, use_gpu=False, warm=sys.argv[3] == "warm")
    runner.run(work, sys.argv[2], "hang")
"""


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Create a folder for what ranks note."""
    (folder := tmp_path / "notes").mkdir()
    return folder


@linux
@pytest.mark.parametrize("victim", ["driver", "supervisor", "zygote and supervisor"])
def test_processes_that_ranks_started_end_with_a_killed_ancestor(
    tmp_path: Path, notes: Path, victim: str
) -> None:
    with driver(DRIVER, tmp_path, HERE, str(notes), "warm") as (process, mark):
        supervisor = psutil.Process(ranks_in(notes)[0]).ppid()
        victims = {
            "driver": [process.pid],
            "supervisor": [supervisor],
            "zygote and supervisor": [psutil.Process(supervisor).ppid(), supervisor],
        }[victim]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        # A forked daemon has no variables of the run, so without any ancestor it is not found.
        assert_nothing_left(notes, processes=3 if victim == "zygote and supervisor" else None)
        if victim == "driver":
            until(lambda: not marked(mark), "processes of the driver are left")


@linux
def test_the_kernel_ends_ranks_whose_supervisor_is_killed_if_the_driver_cannot(
    tmp_path: Path, notes: Path
) -> None:
    """The driver is stopped, and fresh ranks have no zygote."""
    with driver(DRIVER, tmp_path, HERE, str(notes), "fresh") as (process, _):
        ranks = ranks_in(notes)
        supervisor = psutil.Process(ranks[0]).ppid()
        os.kill(process.pid, signal.SIGSTOP)
        os.kill(supervisor, signal.SIGKILL)
        assert_gone(ranks)


FORKING_DRIVER = """
    import os, signal, sys
    sys.path.insert(0, sys.argv[1])
    from support.waiting import until
    from test_endings import Path, work
    from distributor import TorchDistributor

    notes = Path(sys.argv[2])
    runner = TorchDistributor(2, local_mode=True, use_gpu=False, warm=False)
    run = runner.submit(work, str(notes), "hang")
    until(lambda: len(list(notes.glob("*.json"))) == 2, "the ranks run", 60)
    if child := os.fork():
        (notes / "child").write_text(str(child))
    signal.pause()
"""


@linux
def test_ranks_end_with_a_killed_driver_although_its_child_has_its_descriptors(
    tmp_path: Path, notes: Path
) -> None:
    with driver(FORKING_DRIVER, tmp_path, HERE, str(notes)) as (process, _):
        until(lambda: (notes / "child").exists(), "the driver has forked", 60)
        os.kill(process.pid, signal.SIGKILL)
        assert_gone(ranks_in(notes))


def ranks_in(notes: Path) -> list[int]:
    """Wait until all ranks have notes, and return their process ids."""
    until(lambda: len(list(notes.glob("*.json"))) == RANKS, "the ranks run", 60)
    return [json.loads(note.read_text())[1][0] for note in notes.glob("*.json")]


def block() -> None:
    """Block, each rank in another way."""
    import ctypes

    def waits() -> None:
        signal.pause()

    def holds_the_lock() -> None:
        ctypes.PyDLL(None).sleep(1000)

    def is_stopped() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    [waits, holds_the_lock, is_stopped, waits][int(os.environ["RANK"])]()


def wait_for(path: str) -> str:
    """Wait until a file exists."""
    import time

    print("waiting", flush=True)
    while not Path(path).exists():
        time.sleep(0.01)
    return "done"


@cluster_is_slow
def test_the_stacks_of_an_active_run_are_reported(distribute: Distribute, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with ThreadPoolExecutor(1) as other:
        run = other.submit(distribute(RANKS, timeout=120).run, wait_for, str(marker))
        try:
            until(lambda: all_are("in wait_for"), "the ranks report their stacks", 60)
            assert not run.done()
        finally:
            marker.touch()
        assert run.result() == "done"
    assert distributor.stacks() == {}


def all_are(place: str) -> bool:
    """Return whether the stacks of all ranks of the only run have this place."""
    [stacks] = distributor.stacks().values() or [{}]
    return sorted(stacks) == list(range(RANKS)) and all(place in s for s in stacks.values())


@cluster_is_slow
def test_a_deadline_reports_the_stacks_of_ranks(distribute: Distribute) -> None:
    runner: Any = distribute(4, timeout=2)
    with pytest.raises(RunTimeout) as caught:
        runner.run(block)
    stacks = caught.value.stacks
    assert sorted(stacks) == [0, 1, 2, 3]
    assert "in waits" in stacks[0]
    assert "in holds_the_lock" in stacks[1]
    assert "no stack" in stacks[2]
    assert stacks[0] == stacks[3], "equal stacks are shown once"
    assert "ranks 0, 3:\n" in str(caught.value)
    assert "control_channel" not in str(caught.value)


def never_end() -> None:
    threading.Event().wait()


@cluster_is_slow
def test_an_exit_is_reported_if_its_exit_handlers_never_end(distribute: Distribute) -> None:
    def program() -> None:
        if os.environ["RANK"] == "0":
            atexit.register(never_end)
            print("about to leave")
            sys.exit(3)
        never_end()

    with pytest.raises(WorkerDied, match="about to leave") as caught:
        distribute(RANKS, timeout=60).run(program)
    assert caught.value.exit_code == 3


def test_a_value_is_returned_if_its_rank_never_ends(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agent, "LINGERING_WARNING_SECONDS", 0.5)
    monkeypatch.setattr(agent, "LINGERING_KILL_SECONDS", 1.5)

    def program() -> str:
        threading.Thread(target=never_end).start()
        return "done"

    distributor = TorchDistributor(RANKS, use_gpu=False, timeout=60)
    assert distributor.run_all(program) == ["done"] * RANKS
    shown = capfd.readouterr().err
    assert "rank 1 (local rank 1)" in shown
    assert "has done its work, but its process is still running" in shown
    assert "in never_end" in shown


class InterruptedAtItsEnd:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_in_a_finalizer_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    advance, handler = GracefulShutdown.advance, signal.getsignal(signal.SIGINT)

    interrupts = iter([InterruptedAtItsEnd])

    def interrupted_once(shutdown: GracefulShutdown) -> None:
        next(interrupts, object)()
        advance(shutdown)

    monkeypatch.setattr(GracefulShutdown, "advance", interrupted_once)
    with pytest.raises(KeyboardInterrupt, match="has ended, and no rank is left"):
        TorchDistributor(RANKS, use_gpu=False, timeout=60).run(never_end)
    assert (next(interrupts, None), ignored) == (None, []), "it came, and is not printed"
    assert sys.unraisablehook == ignored.append
    assert signal.getsignal(signal.SIGINT) == handler


def test_an_interrupt_at_the_end_of_its_context_leaves_the_usual_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = types.FunctionType(
        (lambda: signal.raise_signal(signal.SIGINT)).__code__,
        {"__name__": "py4j.of_this_test", "signal": signal},
    )
    join, usual = threading.Timer.join, (signal.getsignal(signal.SIGINT), sys.unraisablehook)

    def join_late(timer: threading.Timer) -> None:
        join(timer)
        signal.raise_signal(signal.SIGINT)  # the timer's, which had just been sent

    monkeypatch.setattr(threading.Timer, "join", join_late)
    with pytest.raises(KeyboardInterrupt), Interrupts():
        call()
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == usual
