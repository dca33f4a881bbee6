"""Exceptions of a rank are pickled so that the driver can raise them; unpicklable ones are None."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from typing import Any

import pytest

from distributor.serialization import pickling
from distributor.serialization.pickling import dump_exception, load_exception

LOCK = threading.Lock()


class KeywordOnly(Exception):
    """Default pickling passes only its message to the constructor, which fails."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


class Changing(Exception):
    """Default pickling succeeds and loads with other arguments."""

    def __init__(self, message: str) -> None:
        super().__init__(f"failed: {message}")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Attributes are read-only, and ``args`` is empty."""

    code: int = 0


class Unbuildable(Exception):
    """Neither default pickling nor a reconstruction without its arguments works."""

    def __new__(cls, message: str, detail: str) -> Unbuildable:
        return super().__new__(cls, message)

    def __init__(self, message: str, detail: str) -> None:
        super().__init__(message)


def holding_lock() -> Exception:
    error = ValueError("no")
    error.__dict__.update(guard=LOCK, step=7)
    return error


def local_class() -> Exception:
    class Local(Exception):
        """A class that no other process can import."""

    return Local("no", 3)


@pytest.mark.parametrize(
    ("error", "attributes"),
    [
        (ValueError("plain", 3), {}),
        (OSError(28, "No space left", "file"), {"errno": 28, "filename": "file"}),
        (KeywordOnly("no", code=7), {"code": 7}),
        (Changing("no"), {}),
        (Frozen(7), {"code": 7}),
        (holding_lock(), {"step": 7}),
        (local_class(), {}),
    ],
    ids=lambda it: type(it).__name__ if isinstance(it, Exception) else "",
)
def test_an_exception_round_trips(error: Exception, attributes: dict[str, Any]) -> None:
    pickled = dump_exception(error)
    assert pickled is not None
    loaded = load_exception(pickled)
    assert type(loaded) is type(error)
    assert str(loaded).split(" at 0x")[0] == str(error).split(" at 0x")[0]
    assert len(loaded.args) == len(error.args)
    assert {name: getattr(loaded, name) for name in attributes} == attributes
    assert not hasattr(loaded, "guard")


def test_an_exception_that_cannot_be_sent_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (KeyboardInterrupt(), SystemExit(3), ValueError(LOCK), Unbuildable("no", "way")):
        assert dump_exception(error) is None
    monkeypatch.setattr(pickling, "MAX_EXCEPTION", 1000)
    assert dump_exception(ValueError("x" * 500)) is not None
    assert dump_exception(ValueError("x" * 1500)) is None
    for garbage in (b"", b"garbage", pickle.dumps("no exception")):
        assert load_exception(garbage) is None
