"""Calls, values and exceptions are pickled for a rank; unpicklable parts are named."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import io
import linecache
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from distributor.errors import UnpicklableError
from distributor.serialization import pickling
from distributor.serialization.oob_pickle import anonymous_file
from distributor.serialization.pickle_diagnostics import find_unpicklable, heaviest, name_of
from distributor.serialization.pickling import (
    dump_call,
    dump_exception,
    dump_value,
    install_sources,
    load_exception,
    load_value,
)

LOCK = threading.Lock()


def add(*terms: int, start: int = 0) -> int:
    return sum(terms, start)


def using_lock() -> object:
    return [LOCK for _ in range(2)]


class Holder:
    """An object with attributes and methods."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)

    def method(self) -> None: ...


class Slotted:
    """An object whose attribute is not in a ``__dict__``."""

    __slots__ = ("part",)

    def __init__(self, part: object) -> None:
        self.part = part


def nested(depth: int) -> object:
    return LOCK if depth == 0 else [nested(depth - 1)]


def cycle() -> Holder:
    """Return a cycle, such as a model and its trainer that refer to each other."""
    model = Holder()
    model.__dict__.update(trainer=Holder(model=model, models=[model]), guard=LOCK)
    return model


# Calls


def test_a_call_loads_and_runs() -> None:
    factor = 10
    call = dump_call(lambda *terms, start: add(*terms, start=start) * factor, (1, 2), {"start": 3})
    function, args, kwargs = call.load()
    assert function(*args, **kwargs) == 60


def test_sources_of_notebook_cells_are_sent() -> None:
    name, source = "<ipython-input-7>", "def cell():\n    raise ValueError('in a cell')\n"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile(source, name, "exec"), namespace)
        call = dump_call(lambda: namespace["cell"](), (), {})
    finally:
        del linecache.cache[name]
    assert call.sources == {name: source.splitlines(keepends=True)}
    function, _, _ = call.load()
    cell = inspect.getclosurevars(function).nonlocals["namespace"]["cell"]
    with pytest.raises(OSError, match="could not get source"):
        inspect.getsource(cell)
    install_sources(call.sources)
    try:
        linecache.checkcache()
        assert inspect.getsource(cell) == source
    finally:
        del linecache.cache[name]


def test_an_unpicklable_argument_is_reported_with_its_cause() -> None:
    with pytest.raises(
        UnpicklableError, match=r"'add' .* argument 1\['guard'\] is a lock"
    ) as error:
        dump_call(add, (1, {"guard": LOCK}), {})
    assert isinstance(error.value, TypeError), "as with plain pickle"
    assert isinstance(error.value.__cause__, TypeError)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (add, "add"),
        (lambda: 1, "<lambda>"),
        (Holder().method, "method"),
        (Holder, "Holder"),
        (functools.partial(functools.partial(add, 1), 2), "add"),
        (functools.partial(Holder().method), "method"),
        (print, "print"),
    ],
)
def test_name_of(function: Any, name: str) -> None:
    assert name_of(function) == name


# The culprit


@pytest.mark.parametrize(
    ("thing", "path"),
    [
        (LOCK, "it"),
        ([0, LOCK], "it[1]"),
        ((LOCK,), "it[0]"),
        ({"a": {"b c": LOCK}}, "it['a']['b c']"),
        ({1: [LOCK]}, "it[1][0]"),
        (Holder(fine=1, guard=LOCK), "it.guard"),
        (Holder(inner=[Holder(guard=LOCK)]), "it.inner[0].guard"),
        (Holder(guard=LOCK).method, "it.__self__.guard"),
        (functools.partial(add, 1, LOCK), "it's arguments[1]"),
        (functools.partial(add, start=LOCK), "it's arguments['start']"),  # type: ignore[arg-type]
        (Slotted(LOCK), "it"),
        (lambda: LOCK, "the variable 'LOCK' used by it"),
        (cycle(), "it.guard"),
        (nested(4), "it[0][0][0][0]"),
    ],
)
def test_the_innermost_culprit_is_found(thing: object, path: str) -> None:
    # Like a notebook's code, which a rank cannot import: pickled by value.
    if inspect.isfunction(thing):
        thing = type(thing)(thing.__code__, {**vars(sys.modules[__name__]), "__name__": "cell"})
    found = find_unpicklable("it", thing)
    assert found is not None
    assert found.path == path
    if path != "it" or thing is LOCK:
        assert found.type_name == "lock"
        assert str(found) == f"{path} is a lock (cannot pickle '_thread.lock' object)"


def test_the_path_of_a_deep_culprit_is_bounded() -> None:
    found = find_unpicklable("it", nested(50))
    assert found is not None
    assert found.path.startswith("it[0][0][0]")
    assert found.type_name == "list"


@pytest.mark.parametrize("thing", [None, add, [1, {"a": (2,)}], Holder(a=1), Holder(a=1).method])
def test_what_can_be_pickled_has_no_culprit(thing: object) -> None:
    assert find_unpicklable("it", thing) is None


# Values


def test_a_value_round_trips() -> None:
    with anonymous_file() as file:
        dump_value({"function": lambda: 7, "plain": [1.5, "a"]}, file, "rank 3")
        loaded = load_value(file)
    assert (loaded["function"](), loaded["plain"]) == (7, [1.5, "a"])


def test_the_largest_part_of_a_call_is_named() -> None:
    weights, table = bytes(3_000_000), {"small": bytes(10), "large": [bytes(2_000_000)]}
    path, weight = heaviest(lambda: weights, (), {})
    assert path == "the variable 'weights' used by <lambda>"
    assert 3_000_000 <= weight < 3_001_000
    path, weight = heaviest(add, (1, table), {"other": bytes(1_000_000)})
    assert path == "argument 1['large'][0]"
    assert 2_000_000 <= weight < 2_001_000


def test_a_value_that_cannot_be_pickled_is_named() -> None:
    expected = r"rank 3 returned a value that cannot be pickled: value\['model'\].guard is a lock"
    with pytest.raises(UnpicklableError, match=expected):
        dump_value({"model": Holder(guard=LOCK)}, io.BytesIO(), "rank 3")


class Exhausting:
    """Raises when it is pickled."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [MemoryError("all gone"), OSError(28, "No space left")])
def test_a_lack_of_memory_or_disk_is_not_reported_as_unpicklable(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        dump_value([Exhausting(error)], io.BytesIO(), "rank 3")
    assert caught.value is error


# Exceptions


class KeywordOnly(Exception):
    """Default pickling passes only its message to the constructor, which fails."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


class OtherArguments(Exception):
    """Takes two arguments and keeps one in ``args``."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code


class Changing(Exception):
    """Default pickling succeeds and loads with other arguments."""

    def __init__(self, message: str) -> None:
        super().__init__(f"failed: {message}")


class Disguised(Exception):
    """Its ``__reduce__`` loads as another type."""

    def __reduce__(self) -> Any:
        return ValueError, self.args


class Refusing(Exception):
    """Its ``__reduce__`` raises."""

    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


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
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), {"reason": "bad"}),
        (KeywordOnly("no", code=7), {"code": 7}),
        (OtherArguments(7, "no"), {"code": 7}),
        (Changing("no"), {}),
        (Disguised("no"), {}),
        (Refusing("no", 3), {}),
        (Frozen(7), {"code": 7}),
        (holding_lock(), {"step": 7}),
        (local_class(), {}),
        (ValueError(Holder()), {}),
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


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        SystemExit(3),
        ValueError(LOCK),
        Unbuildable("no", "way"),
    ],
    ids=lambda it: type(it).__name__,
)
def test_an_exception_that_cannot_be_sent_is_none(error: BaseException) -> None:
    assert dump_exception(error) is None


def test_an_exception_that_is_too_large_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickling, "MAX_EXCEPTION", 1000)
    assert dump_exception(ValueError("x" * 500)) is not None
    assert dump_exception(ValueError("x" * 1500)) is None


@pytest.mark.parametrize("garbage", [b"", b"garbage", pickle.dumps("no exception")])
def test_garbage_loads_as_none(garbage: bytes) -> None:
    assert load_exception(garbage) is None


def test_an_exception_whose_module_is_missing_here_loads_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_on_the_node.py").write_text("class Odd(Exception): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("only_on_the_node")
    pickled = dump_exception(module.Odd("no"))
    assert pickled is not None
    assert type(load_exception(pickled)) is module.Odd
    monkeypatch.undo()
    del sys.modules["only_on_the_node"]
    importlib.invalidate_caches()
    assert load_exception(pickled) is None
