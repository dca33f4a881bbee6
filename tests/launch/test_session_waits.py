"""A Spark Connect server that does not answer."""

from __future__ import annotations

from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from distributor._compat import pyspark as private
from distributor.errors import ApplicationEnded
from distributor.spark import application_end


def test_a_connect_server_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "is_connect_session", lambda spark: True)
    monkeypatch.setattr(application_end, "ANSWER_SECONDS", 0.2)
    released = Event()
    server: Any = SimpleNamespace(conf=SimpleNamespace(get=lambda *_: released.wait(60)))
    with pytest.raises(ApplicationEnded, match="has not answered for"):
        application_end.check_not_ended(server)

    released.set()
    application_end.check_not_ended(server)
