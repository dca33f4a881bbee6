"""Waits for a Spark session that does not go on: for a file that is sent, and for a server."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from distributor._compat import pyspark as private
from distributor.errors import ApplicationEnded
from distributor.spark import application_end, executor_files
from distributor.spark.session import Session


class Server:
    """The part of a Connect session that these waits use; it answers once `released` is set."""

    def __init__(self) -> None:
        self.conf = self
        self.released = threading.Event()
        self.asked = threading.Event()

    def get(self, *_: str) -> str:
        self.asked.set()
        assert self.released.wait(60)
        return "app"

    def addArtifacts(self, path: str, **_: Any) -> None:
        if Path(path).name == "slow":
            self.get()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(private, "is_connect_session", lambda spark: True)
    monkeypatch.setattr(application_end, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(executor_files, "WAIT_SECONDS", 0.2)
    server = Server()
    yield server
    server.released.set()


def test_a_connect_server_that_does_not_answer_is_an_error(server: Any) -> None:
    with pytest.raises(ApplicationEnded, match="has not answered for"):
        application_end.check_not_ended(server)

    server.released.set()
    application_end.check_not_ended(server)


def test_a_file_waits_only_for_the_same_file_and_not_for_ever(server: Any) -> None:
    session, written = Session(server), []

    def send(name: str) -> None:
        executor_files.send_file(session, name, lambda path: written.append(path.name))

    sender = threading.Thread(target=send, args=("slow",), daemon=True)
    sender.start()
    assert server.asked.wait(30)
    send("other")
    with pytest.raises(TimeoutError, match="sending the file slow to the executors"):
        send("slow")
    server.released.set()
    sender.join(30)
    send("slow")

    assert written == ["slow", "other"]
