"""Unexpected messages disturb neither a zygote nor its runs."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cloudpickle
import pytest
from support.zygotes import held_run, zygote_of

from distributor.node.process import zygote as zygote_module
from distributor.node.process.supervisor import is_supported

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


def test_unknown_messages_are_ignored(tmp_path: Path) -> None:
    packets = b"garbage", b"", pickle.dumps("of another version"), b"\x80\x04cno_such\nThing\n."
    with held_run(tmp_path / "run") as run:
        for packet in packets:
            with connected() as peer:
                peer.sendall(packet)
                assert zygote_of() == run.zygote
        assert run.release() == ["undisturbed"]
