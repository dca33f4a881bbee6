"""How a node gets a large program: from another node, from the driver, or not at all."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.hubs import SECRET

from distributor.launchers.spark.task import program_file as module
from distributor.launchers.spark.task.program_file import program_file
from distributor.launchers.spark.task.task_spec import ProgramFile
from distributor.node.agent.share import NodeShare
from distributor.wire.messages import ProgramRelay, ProgramSource, ProgramStored, ProgramWanted
from distributor.wire.transfer import (
    CHUNK,
    BlockServer,
    MemoryBlock,
    ProgramNotReceived,
    block_secret,
    digest,
    receive,
)

CONTENT = os.urandom(2 * CHUNK + 5)
NAME = f"distributor-program-{digest(MemoryBlock([CONTENT]), len(CONTENT))}"
Serve = Callable[..., "tuple[str, int]"]


class Answers:
    """A node whose driver names one source."""

    def __init__(self, source: ProgramSource | ProgramStored | None) -> None:
        self._source = source
        self.sent: list[object] = []

    def find_program(self, wanted: ProgramWanted) -> ProgramSource | ProgramStored | None:
        self.sent.append(wanted)
        return self._source

    def send(self, message: object) -> None:
        self.sent.append(message)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve a block at an address of this machine: ``serve("127.0.0.2", content)``."""
    with contextlib.ExitStack() as until_end:

        def start(address: str, content: bytes) -> tuple[str, int]:
            server = BlockServer(address, block_secret(SECRET), MemoryBlock([content]))
            return address, until_end.enter_context(server).port

        yield start


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "spark_files_folder", lambda: tmp_path)
    return tmp_path


def opened(channel: Any, hub: tuple[str, int]) -> contextlib.AbstractContextManager[Any]:
    program = ProgramFile(NAME, len(CONTENT))
    share = NodeShare(run_id="run", ranks_per_node=1, secret=b"", node_rank=1, address="127.0.0.1")
    channel.share = share
    spec: Any = SimpleNamespace(program=program, hub=hub, secret=SECRET, share=share)
    return program_file(spec, channel)


def closed_port() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return "127.0.0.1", listener.getsockname()[1]


@pytest.mark.parametrize("sent", [CONTENT, CONTENT[: CHUNK + 1], b""], ids=["all", "part", "none"])
def test_what_a_node_does_not_send_comes_from_the_driver(
    serve: Serve, folder: Path, sent: bytes
) -> None:
    channel = Answers(ProgramSource(serve("127.0.0.2", sent)))
    with opened(channel, hub=serve("127.0.0.3", CONTENT)) as file:
        assert file.read() == CONTENT
    assert [path.name for path in folder.iterdir()] == [NAME]
    assert [type(each) for each in channel.sent] == [ProgramWanted, ProgramRelay, ProgramStored]


def test_a_node_that_cannot_be_reached_is_replaced_by_the_driver(
    serve: Serve, folder: Path
) -> None:
    channel = Answers(ProgramSource(closed_port()))
    with opened(channel, hub=serve("127.0.0.3", CONTENT)) as file:
        assert file.read() == CONTENT


def test_a_node_passes_on_what_it_has_received(serve: Serve, folder: Path) -> None:
    channel, found = Answers(ProgramSource(None)), bytearray()
    with opened(channel, hub=serve("127.0.0.3", CONTENT)):
        [relay] = [each for each in channel.sent if isinstance(each, ProgramRelay)]
        receive((relay.host, relay.port), block_secret(SECRET), 2, 0, found.extend)
    assert bytes(found) == CONTENT


def test_a_file_that_is_there_is_not_asked_for(folder: Path) -> None:
    (folder / NAME).write_bytes(CONTENT)
    channel = Answers(None)
    with opened(channel, hub=closed_port()) as file:
        assert file.read() == CONTENT
    assert channel.sent == []


def test_without_a_link_the_program_has_to_come_through_spark(folder: Path) -> None:
    hub = closed_port()
    with pytest.raises(ProgramNotReceived) as caught, opened(Answers(None), hub):
        pass
    assert f"no link to the driver at {hub[0]}:{hub[1]}" in str(caught.value)


def test_an_incomplete_program_is_an_error_and_leaves_no_file(serve: Serve, folder: Path) -> None:
    channel = Answers(ProgramSource(None))
    with (
        pytest.raises(ProgramNotReceived) as caught,
        opened(channel, hub=serve("127.0.0.3", CONTENT[:CHUNK])),
    ):
        pass
    assert "1.05 MB of the 2.1 MB" in str(caught.value)
    assert list(folder.iterdir()) == []


def test_a_program_that_was_changed_on_the_way_is_not_used(serve: Serve, folder: Path) -> None:
    changed = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    channel, hub = Answers(ProgramSource(serve("127.0.0.2", changed))), serve("127.0.0.3", CONTENT)
    with pytest.raises(ProgramNotReceived, match="and its arguments changed"), opened(channel, hub):
        pass
    assert list(folder.iterdir()) == []
    assert ProgramStored not in map(type, channel.sent)


def test_what_comes_beyond_the_end_of_a_program_is_not_stored(serve: Serve, folder: Path) -> None:
    channel = Answers(ProgramSource(serve("127.0.0.2", CONTENT + bytes(CHUNK))))
    with opened(channel, hub=serve("127.0.0.3", CONTENT)) as file:
        assert file.read() == CONTENT
