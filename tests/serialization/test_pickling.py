"""Calls and values are pickled for a rank; unpicklable and large parts are named."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from distributor.serialization import code_pickle
from distributor.serialization.pickle_diagnostics import find_unpicklable, heaviest
from distributor.serialization.pickling import (
    dump_call,
)

LOCK = threading.Lock()


def add(*terms: int, start: int = 0) -> int:
    return sum(terms, start)


class Holder:
    """An object with attributes and methods."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)

    def method(self) -> None: ...


def nested(depth: int) -> object:
    return LOCK if depth == 0 else [nested(depth - 1)]


def cycle() -> Holder:
    """Return a cycle, such as a model and its trainer that refer to each other."""
    model = Holder()
    model.__dict__.update(trainer=Holder(model=model, models=[model]), guard=LOCK)
    return model


class Counted:
    """An argument that counts how often it is pickled."""

    pickled = 0

    def __reduce__(self) -> Any:
        Counted.pickled += 1
        return Counted, ()


def run_as_main(source: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(source, vars(module))
    return module


OF_MAIN = """
import threading
class Config: values = [1]
class Whole:
    guard = threading.Lock()
    class Part: ...
WEIGHTS = bytearray(100_000)
def train(*args): return type(args[0]).__name__, len(WEIGHTS)
"""


def test_the_main_module_is_sent_with_a_call_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    program = run_as_main(OF_MAIN, monkeypatch)
    Counted.pickled = 0
    call = dump_call(program.train, (program.Config(), Counted()), {})
    assert Counted.pickled == 1
    assert call.size < 150_000, "a global's memory is sent once"
    main: dict[str, Any] = {"__name__": "__main__"}
    function, args, _ = call.load(main)
    assert (function(*args), function.__globals__) == (("Config", 100_000), main)
    assert main["train"] is function
    children: dict[str, Any] = {"__name__": "__mp_main__"}
    call.load_main(children)
    assert (children["__name__"], children["train"](1)) == ("__mp_main__", ("int", 100_000))
    assert Counted.pickled == 1


def test_a_class_that_cannot_be_pickled_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    program = run_as_main(OF_MAIN, monkeypatch)
    main: dict[str, Any] = {}
    function, args, _ = dump_call(program.train, (program.Whole.Part(),), {}).load(main)
    assert function(*args) == ("Part", 100_000)
    assert "train" in main


CELLS = """
import sys
SCALE = 1.0
class Other:
    kept = sys.__dict__.setdefault("kept", [])
class Net:
    bias = 0.0
    def forward(self, x): return x * SCALE + self.bias + helper()
def helper(): return 0.0
def program():
    Other.kept.append((Net, Other))
    return Net().forward(1.0), id(Net), id(Other)
"""


class Run:
    """An object that runs a function where it is loaded, and loads as its value."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def __reduce__(self) -> Any:
        return self.function, ()


def test_a_process_that_is_used_again_gets_a_class_as_it_is_now() -> None:
    cells: dict[str, Any] = {"__name__": "__main__"}
    exec(CELLS, cells)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:

        def run() -> Any:
            return pool.submit(pickle.loads, code_pickle.dumps(Run(cells["program"]))).result()

        value, *first = run()
        assert (value, *first) == run() == (1.0, *first), "what has not changed is the same class"
        cells["SCALE"] = 5.0
        value, changed, other = run()
        assert value == 5.0
        assert changed != first[0]
        assert other == first[1], "which does not use what has changed"
        exec("def helper(): return 1.0", cells)
        assert run()[0] == 6.0
        cells["SCALE"] = 1.0
        exec("def helper(): return 0.0", cells)
        assert run()[0] == 1.0


def test_the_innermost_culprit_is_found_and_deep_paths_are_bounded() -> None:
    assert str(find_unpicklable("it", cycle())) == (
        "it.guard is a lock (cannot pickle '_thread.lock' object)"
    )
    assert find_unpicklable("it", [1, {"a": (2,)}, Holder(a=1).method]) is None
    found = find_unpicklable("it", nested(50))
    assert found is not None
    assert found.type_name == "list"


def test_the_largest_part_of_a_call_is_named() -> None:
    weights, table = bytes(3_000_000), {"small": bytes(10), "large": [bytes(2_000_000)]}
    path, weight = heaviest(lambda: weights, (), {})
    assert path == "the variable 'weights' used by <lambda>"
    assert 3_000_000 <= weight < 3_001_000
    path, weight = heaviest(add, (1, table), {"other": bytes(1_000_000)})
    assert path == "argument 1['large'][0]"
    assert 2_000_000 <= weight < 2_001_000
