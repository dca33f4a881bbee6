"""Unexpected messages and peers disturb neither a zygote nor its runs."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cloudpickle
import psutil
import pytest
from support.waiting import until
from support.zygotes import held_run, zygote_of

from distributor.node.process import zygote as zygote_module
from distributor.node.process.supervisor import is_supported
from distributor.node.process.zygote import ShutDown

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


def test_unknown_messages_are_ignored(tmp_path: Path) -> None:
    packets = b"garbage", b"", pickle.dumps("of another version"), b"\x80\x04cno_such\nThing\n."
    with held_run(tmp_path / "run") as run:
        for packet in packets:
            with connected() as peer:
                peer.sendall(packet)
                assert zygote_of() == run.zygote
        assert run.release() == ["undisturbed"]


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
