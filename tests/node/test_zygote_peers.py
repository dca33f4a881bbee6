"""Unexpected messages and peers disturb neither a zygote nor its runs."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cloudpickle
import psutil
import pytest
from support.waiting import assert_gone, until
from support.zygotes import DEADLINE, held_run, local, zygote_of

from distributor.launchers.local import cool_down
from distributor.node.agent.worker_env import common_environment
from distributor.node.process import zygote as zygote_module
from distributor.node.process.fork_reset import ProcessAttributes
from distributor.node.process.scratch import new_scratch_path
from distributor.node.process.spawner import StartLimit, WorkerSpec
from distributor.node.process.supervisor import StartRank, SupervisedSpawner, is_supported
from distributor.node.process.zygote import ShutDown, ZygoteSpec
from distributor.programs.programs import program_of
from distributor.serialization.oob_pickle import anonymous_file
from distributor.serialization.outcome import Origin
from distributor.serialization.program import in_file

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [
    pytest.mark.skipif(not is_supported(), reason="only Linux has warm processes"),
    pytest.mark.usefixtures("modules_folder", "without_torch"),
]


@contextmanager
def connected() -> Iterator[socket.socket]:
    """Connect to the zygote of this process."""
    connection = zygote_module._connect(os.getpid())
    assert connection is not None
    with connection:
        yield connection


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process within the context, so that it then finds all events at once."""
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it has stopped")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "packet",
    [b"garbage", b"", pickle.dumps("of another version"), b"\x80\x04cno_such_module\nThing\n."],
    ids=["garbage", "empty", "unknown", "unknown type"],
)
def test_unknown_messages_are_ignored(tmp_path: Path, packet: bytes) -> None:
    with held_run(tmp_path / "run") as run:
        with connected() as peer:
            peer.sendall(packet)
            assert zygote_of() == run.zygote
        assert zygote_of() == run.zygote
        assert run.release() == ["undisturbed"]


def test_a_request_without_descriptors_ends_only_its_supervisor(tmp_path: Path) -> None:
    worker_spec = WorkerSpec(
        origin=Origin(rank=0, local_rank=0, host="here", attempt=0),
        parent=os.getpid(),
        control=0,
        program=0,
        outcome=0,
        stacks=0,
        progress=0,
        listener=None,
        scratch=new_scratch_path(),
        keep_value=False,
    )
    zygote_spec = ZygoteSpec(owner=os.getpid(), environment=common_environment(1, {}, os.environ))
    with held_run(tmp_path / "run") as run:
        limit = StartLimit(time.monotonic() + DEADLINE)
        with zygote_module._request_supervisor(zygote_spec, limit) as spawner:
            request = StartRank(worker_spec, ProcessAttributes.current())
            spawner._connection.sendall(pickle.dumps(request))
            assert_gone([spawner._supervisor_pid])
        assert zygote_of() == run.zygote
        assert run.release() == ["undisturbed"]
        until(lambda: not psutil.Process(run.zygote).children(), "a process is left")


def test_a_silent_peer_delays_neither_runs_nor_shutdown() -> None:
    zygote = zygote_of()
    with connected():
        assert zygote_of(2) == zygote
        cool_down()
        assert_gone([zygote])


def test_a_connection_during_shutdown_disturbs_no_run(tmp_path: Path) -> None:
    """This happens if one thread calls cool_down, or needs another zygote, while another runs."""
    with held_run(tmp_path / "run") as run, connected() as closing:
        assert zygote_of() == run.zygote, "so it has accepted the connection"
        with stopped(run.zygote):
            closing.sendall(pickle.dumps(ShutDown()))
            late = zygote_module._connect(os.getpid())
        assert late is not None
        with late:
            assert zygote_of() != run.zygote
            assert run.release() == ["undisturbed"]


def test_a_rank_that_ends_with_its_agent_disturbs_no_run(tmp_path: Path) -> None:
    """This happens if a task of an executor is killed, and its ranks end at the same moment."""
    identity = {"TORCHELASTIC_RUN_ID": "of this test", "GROUP_RANK": "0", "RANK": "0"}
    environment = common_environment(1, {}, os.environ) | identity
    zygote_spec = ZygoteSpec(owner=os.getpid(), environment=environment)
    ours, theirs = socket.socketpair()
    with (
        held_run(tmp_path / "run") as run,
        in_file(program_of(signal.pause, (), {})) as program,
        anonymous_file() as outcome,
        tempfile.TemporaryFile() as output,
        zygote_module.open_spawner(zygote_spec, StartLimit(time.monotonic() + DEADLINE)) as starter,
        ours,
        theirs,
    ):
        assert isinstance(starter, SupervisedSpawner)
        worker_spec = WorkerSpec(
            origin=Origin(rank=0, local_rank=0, host="here", attempt=0),
            parent=os.getpid(),
            control=theirs.fileno(),
            program=program.fileno(),
            outcome=outcome.fileno(),
            stacks=outcome.fileno(),
            progress=outcome.fileno(),
            listener=None,
            scratch=new_scratch_path(),
            keep_value=False,
        )
        rank = starter.start(worker_spec, environment, output, output, lambda: None)
        with stopped(starter._supervisor_pid):
            starter._connection.shutdown(socket.SHUT_RDWR)
            os.kill(rank.pid, signal.SIGKILL)
            assert_gone([rank.pid])
        assert zygote_of() == run.zygote
        assert run.release() == ["undisturbed"]


def test_a_variable_larger_than_a_packet_works(tmp_path: Path) -> None:
    with held_run(tmp_path / "run") as run:
        env = {"TORCH_VARIABLE": "x" * 70_000}
        assert local(env=env).run(os.getenv, "TORCH_VARIABLE") == env["TORCH_VARIABLE"]
        assert run.release() == ["undisturbed"]
