"""``start_timeout`` holds, and nothing is left, while a process that starts ranks hangs."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import psutil
import pytest
from support.driver_process import driver
from support.waiting import assert_gone, marked, until
from support.zygotes import DEADLINE, WriteModule, local, waiting_source, zygotes

from distributor import StartTimeout, warm_up
from distributor.node.agent.worker_env import common_environment
from distributor.node.node import Node
from distributor.node.process import supervisor
from distributor.node.process import zygote as zygote_module
from distributor.node.process.spawner import StartLimit
from distributor.node.process.supervisor import is_supported
from distributor.node.process.zygote import RequestSupervisor, ZygoteSpec

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [
    pytest.mark.skipif(not is_supported(), reason="only Linux has warm processes"),
    pytest.mark.usefixtures("modules_folder", "without_torch"),
]

SOURCE = """
import os, pathlib, time

folder = pathlib.Path({folder!r})
generation = 0  # of the zygote; 1 of supervisors, 2 of ranks

def begin():
    global generation
    generation += 1

def hang(place):
    if (folder / f"{{place}} {{generation}}").exists():
        (folder / "hung").write_text(str(os.getpid()))
        while True:
            time.sleep(0.05)

os.register_at_fork(
    before=lambda: hang("before"),
    after_in_parent=lambda: hang("parent"),
    after_in_child=lambda: (begin(), hang("child")),
)
"""


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("child 1", "has forked a process that hangs"),
        ("before 1", "has not answered (supervisor, process "),
        ("parent 1", "has not answered (supervisor, process "),
        ("child 2", "After start_timeout, still starting: ranks 0 to 1 on "),
        ("before 0", "does not answer: it is still importing, or hangs"),
    ],
)
def test_the_start_of_ranks_that_hangs_in_a_fork_ends_at_start_timeout(
    tmp_path: Path, write_module: WriteModule, place: str, said: str
) -> None:
    name = write_module(SOURCE.format(folder=str(tmp_path)))
    supervisor, rank = local(2, preload=[name]).run(lambda: (os.getppid(), os.getpid()))
    assert supervisor != os.getpid()
    (tmp_path / place).touch()
    began = time.monotonic()
    with pytest.raises(StartTimeout, match="start_timeout") as caught:
        # Long enough for what does not hang: the zygote of a busy machine may take seconds.
        local(2, preload=[name], start_timeout=6).run(os.getpid)
    assert time.monotonic() < began + 15
    assert said in str(caught.value)
    hung = int((tmp_path / "hung").read_text())
    assert hung not in (supervisor, rank)
    if place == "before 0":
        os.kill(hung, signal.SIGKILL)  # the zygote, which other runs may still be waiting for
    assert_gone([hung])


@pytest.mark.parametrize("place", ["child 1", "before 1"])
@pytest.mark.parametrize("request_", ["cancel", pytest.param("Ctrl-C", marks=pytest.mark.slow)])
def test_the_start_of_ranks_that_hangs_in_a_fork_can_be_cancelled(
    tmp_path: Path, write_module: WriteModule, place: str, request_: str
) -> None:
    (tmp_path / place).touch()
    ranks = local(2, preload=[write_module(SOURCE.format(folder=str(tmp_path)))])
    hung = tmp_path / "hung"
    if request_ == "cancel":
        run = ranks.submit(os.getpid)
        until(hung.exists, "it hangs", DEADLINE)
        assert run.cancel()
    else:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(interrupt_once, hung.exists)
            with pytest.raises(KeyboardInterrupt):
                ranks.run(os.getpid)
    until(hung.read_text, "it has written its process id")
    assert_gone([int(hung.read_text())])


def test_a_supervisor_that_hangs_ends_if_its_run_has_ended_before_the_fork(
    tmp_path: Path, write_module: WriteModule
) -> None:
    begun, go, forked = (tmp_path / name for name in ("begun", "go", "forked"))
    source = SOURCE.format(folder=str(tmp_path)) + waiting_source(begun, go)
    name = write_module(f"{source}\nos.register_at_fork(after_in_parent=(folder / 'forked').touch)")
    warm_up(local(preload=[name]))
    (tmp_path / "child 1").touch()
    until(begun.exists, "it is loading", DEADLINE)
    environment = common_environment(1, {}, os.environ)
    zygote_spec = ZygoteSpec(owner=os.getpid(), environment=environment, preload=(name,))
    connection = zygote_module._connect(os.getpid())
    assert connection
    with connection:
        connection.sendall(pickle.dumps(RequestSupervisor(zygote_spec.preload_spec)))
    go.touch()
    until(forked.exists, "it has forked", DEADLINE)
    [zygote] = zygotes()
    until(lambda: not psutil.Process(zygote).children(), "the supervisor is left")


def interrupt_once(condition: Callable[[], bool]) -> None:
    """Send this process the signal of a Ctrl-C once a condition holds."""
    until(condition, "it hangs", DEADLINE)
    os.kill(os.getpid(), signal.SIGINT)


def test_a_supervisor_that_does_not_become_ready_ends_at_start_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    interpreter = tmp_path / "python"
    interpreter.write_text(
        f"#!/bin/sh\necho $$ > {pid}.part\nmv {pid}.part {pid}\nexec sleep 600\n"
    )
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))

    def from_now(node: Node) -> StartLimit:
        """Begin when the supervisor is started: on a busy machine, what precedes takes seconds."""
        return StartLimit(time.monotonic() + 1, node.check_not_ended)

    with monkeypatch.context() as patch:
        patch.setattr(Node, "start_limit", property(from_now))
        with pytest.raises(StartTimeout, match=f"start_timeout has passed, and {interpreter} on "):
            local(warm=False).run(os.getpid)
    assert_gone([int(pid.read_text())])
    pid.unlink()
    run = local(warm=False).submit(os.getpid)
    until(pid.exists, "it has started", DEADLINE)
    assert run.cancel()
    assert_gone([int(pid.read_text())])
    monkeypatch.setattr(supervisor, "READY_SECONDS", 1.0)
    with pytest.raises(RuntimeError, match="has not become the supervisor of ranks within 1 s"):
        local(warm=False).run(os.getpid)


HANGING_DRIVER = """
    import sys

    from distributor import TorchDistributor

    sys.path.append(sys.argv[1])
    TorchDistributor(2, use_gpu=False, warm=True, preload=["hangs"]).run(int)
"""


@pytest.mark.slow  # supervisors have 20 s to end by themselves
@pytest.mark.parametrize("place", ["child 1", "before 1"])
def test_a_supervisor_that_hangs_in_a_fork_ends_with_the_driver(tmp_path: Path, place: str) -> None:
    (tmp_path / "hangs.py").write_text(SOURCE.format(folder=str(tmp_path)))
    (tmp_path / place).touch()
    with driver(HANGING_DRIVER, tmp_path, str(tmp_path)) as (process, mark):
        until((tmp_path / "hung").exists, "it hangs", DEADLINE)
        process.kill()
        until(lambda: not marked(mark), "the supervisor is left", 40)
