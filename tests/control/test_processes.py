"""Runs of several nodes, each in a process of its own: what the controller makes of them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest
from support.process_launcher import ProcessLauncher, distribute
from support.waiting import assert_gone, until

from distributor import Listener, NodeLost, RunStalled, RunTimeout, StartTimeout
from distributor.errors import RunCancelled
from distributor.node.process.supervisor import is_supported

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.skipif(not is_supported(), reason="only Linux has supervisors")

WAIT = 60.0


def identity() -> tuple[int, int, str]:
    return int(os.environ["RANK"]), int(os.environ["GROUP_RANK"]), os.environ["MASTER_PORT"]


def wait_for_the_end(folder: Path) -> None:
    rank = os.environ["RANK"]
    (folder / rank).write_text(str(os.getpid()))
    time.sleep(WAIT)


def pids_in(folder: Path, count: int) -> list[int]:
    def all_there() -> bool:
        texts = [path.read_text() for path in folder.iterdir()]
        return len(texts) == count and all(texts)

    until(all_there, "all ranks have written their process ids", WAIT)
    return [int(path.read_text()) for path in folder.iterdir()]


def test_nodes_find_each_other_and_values_arrive_in_rank_order() -> None:
    values = distribute(ProcessLauncher(ranks_per_node=2), 4, identity)
    assert [value[:2] for value in values] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert len({port for *_, port in values}) == 1


def test_a_large_value_arrives_whole() -> None:
    def large() -> bytes:
        return os.environ["RANK"].encode() * 10_000_000

    assert distribute(ProcessLauncher(), 2, large) == [b"0" * 10_000_000, b"1" * 10_000_000]


def test_a_failure_on_one_node_stops_the_others(tmp_path: Path) -> None:
    def fail() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("of rank 1")
        wait_for_the_end(tmp_path)

    with pytest.raises(ValueError, match="of rank 1") as caught:
        distribute(ProcessLauncher(), 3, fail)
    assert list(vars(caught.value)["rank_failures"]) == [1]
    assert_gone([int(path.read_text()) for path in tmp_path.iterdir()])


def test_a_lost_node_ends_the_attempt_and_another_follows(tmp_path: Path) -> None:
    """The launcher reports the end of the node's process, and the controller ends the others."""

    def work() -> str:
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        if attempt == "0":
            wait_for_the_end(tmp_path)
        return attempt

    launcher = ProcessLauncher()

    def kill() -> None:
        pids_in(tmp_path, 2)
        launcher.processes[1].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    assert distribute(launcher, 2, work, max_failures=1) == ["1", "1"]
    killer.join()
    assert_gone([int(path.read_text()) for path in tmp_path.iterdir()])


def test_a_lost_node_is_the_error_of_the_last_attempt(tmp_path: Path) -> None:
    launcher = ProcessLauncher()

    def kill() -> None:
        pids_in(tmp_path, 2)
        launcher.processes[0].send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(NodeLost, match="node 0 ended with -9"):
        distribute(launcher, 2, lambda: wait_for_the_end(tmp_path))
    killer.join()
    assert_gone([int(path.read_text()) for path in tmp_path.iterdir()])


@pytest.mark.parametrize(
    ("setting", "kind"), [("timeout", RunTimeout), ("stall_timeout", RunStalled)]
)
def test_a_deadline_shows_the_stacks_of_all_nodes(
    tmp_path: Path, setting: str, kind: type[RunTimeout]
) -> None:
    limits = {setting: 1.5}
    with pytest.raises(kind) as caught:
        distribute(ProcessLauncher(), 2, lambda: wait_for_the_end(tmp_path), **limits)
    assert caught.value.stacks.keys() == {0, 1}
    assert all("wait_for_the_end" in text for text in caught.value.stacks.values())


def test_a_node_that_does_not_start_ends_the_attempt_at_start_timeout() -> None:
    launcher = ProcessLauncher()

    def stop() -> None:
        until(lambda: 1 in launcher.processes, "it is there", WAIT)
        launcher.processes[1].send_signal(signal.SIGSTOP)

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(StartTimeout, match="After start_timeout, "):
        distribute(launcher, 2, identity, start_timeout=3)
    stopper.join()


def test_a_listener_that_raises_ends_the_ranks_of_all_nodes(tmp_path: Path) -> None:
    class Impatient(Listener):
        def printed(self, rank: int, stream: object, data: bytes) -> None:
            raise RunCancelled("enough")

    def talk() -> None:
        wait: Callable[[Path], None] = wait_for_the_end
        pids = tmp_path
        if os.environ["RANK"] == "0":
            until(lambda: (pids / "1").exists(), "the other rank is there", WAIT)
            print("ready", flush=True)
        wait(pids)

    with pytest.raises(RunCancelled, match="enough"):
        distribute(ProcessLauncher(), 2, talk, listeners=[Impatient()])
    assert_gone([int(path.read_text()) for path in tmp_path.iterdir()])
