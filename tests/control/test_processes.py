"""Runs of several nodes, each in a process of its own: what the controller makes of them."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import pytest
from support.process_launcher import ProcessLauncher, distribute
from support.waiting import assert_gone, until

from distributor import RunTimeout
from distributor.node.process.supervisor import is_supported

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.skipif(not is_supported(), reason="only Linux has supervisors")

WAIT = 60.0


def identity() -> tuple[int, int, str, bytes]:
    rank = os.environ["RANK"]
    return int(rank), int(os.environ["GROUP_RANK"]), os.environ["MASTER_PORT"], large(rank)


def large(rank: object) -> bytes:
    return str(rank).encode() * 5_000_000


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
    assert len({value[2] for value in values}) == 1
    assert [value[3] for value in values] == [large(rank) for rank in range(4)]


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


@pytest.mark.slow
def test_a_deadline_shows_the_stacks_of_all_nodes(tmp_path: Path) -> None:
    with pytest.raises(RunTimeout) as caught:
        distribute(ProcessLauncher(), 2, lambda: wait_for_the_end(tmp_path), timeout=1.5)
    assert caught.value.stacks.keys() == {0, 1}
    assert all("wait_for_the_end" in text for text in caught.value.stacks.values())
