"""Waits for a Spark Connect server, and for a file that another run sends, have an end."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from distributor._compat import pyspark as private
from distributor.errors import ApplicationEnded
from distributor.spark import application as application_end
from distributor.spark import shipping as executor_files


def test_a_connect_server_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "is_connect_session", lambda spark: True)
    monkeypatch.setattr(application_end, "ANSWER_SECONDS", 0.2)
    released = Event()
    server: Any = SimpleNamespace(conf=SimpleNamespace(get=lambda *_: released.wait(20)))
    with pytest.raises(ApplicationEnded, match="has not answered for"):
        application_end.check_not_ended(server)
    with pytest.raises(KeyError, match="of a run"), application_end.end_explained(server):
        raise KeyError("of a run")

    released.set()
    application_end.check_not_ended(server)


def test_a_file_waits_only_for_the_run_that_sends_it_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor_files, "WAIT_SECONDS", 0.2)
    session, begun, released, written = Mock(is_connect=True), Event(), Event(), list[str]()

    def write(path: Path) -> None:
        written.append(path.name)
        if path.name == "slow":
            begun.set()
            released.wait(20)

    first = Thread(target=executor_files.send_file, args=(session, "slow", write))
    first.start()
    assert begun.wait(20)
    executor_files.send_file(session, "other", write)
    with pytest.raises(TimeoutError, match="sending the file slow to the executors"):
        executor_files.send_file(session, "slow", write)
    released.set()
    first.join(60)
    executor_files.send_file(session, "slow", write)
    assert written == ["slow", "other"]
