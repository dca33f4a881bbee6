"""Calls and values are pickled for a rank; unpicklable and large parts are named."""

from __future__ import annotations

import functools
import inspect
import io
import linecache
import multiprocessing
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from distributor.errors import UnpicklableError
from distributor.serialization import code_pickle
from distributor.serialization.oob_pickle import anonymous_file, unpack
from distributor.serialization.pickle_diagnostics import find_unpicklable, heaviest, name_of
from distributor.serialization.pickling import (
    dump_call,
    dump_value,
    install_sources,
)

LOCK = threading.Lock()


def add(*terms: int, start: int = 0) -> int:
    return sum(terms, start)


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


def test_a_function_keeps_the_name_of_its_file() -> None:
    function, _, _ = dump_call(lambda: [add for _ in range(2)], (), {}).load()
    assert function.__code__.co_filename == __file__
    pickled = code_pickle.dumps(lambda: None)
    assert pickle.loads(pickled).__code__.co_filename == __file__


def test_sources_of_notebook_cells_are_sent() -> None:
    name, source = "<ipython-input-7>", "def cell():\n    raise ValueError('in a cell')\n"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile(source, name, "exec"), namespace)
        run_cell = namespace["cell"]  # not its namespace, to which exec added all built-ins
        call = dump_call(lambda: run_cell(), (), {})
    finally:
        del linecache.cache[name]
    assert call.sources == {name: source.splitlines(keepends=True)}
    function, _, _ = call.load()
    cell = inspect.getclosurevars(function).nonlocals["run_cell"]
    with pytest.raises(OSError, match="could not get source"):
        inspect.getsource(cell)
    install_sources(call.sources)
    try:
        linecache.checkcache()
        assert inspect.getsource(cell) == source
    finally:
        del linecache.cache[name]


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
class Other: config = Config()
class Guarded:
    guard = threading.Lock()
    def __reduce__(self): return int, (5,)
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


def test_classes_found_late_are_among_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    program = run_as_main(OF_MAIN, monkeypatch)
    main: dict[str, Any] = {}
    dump_call(program.train, ([program.Other()],), {}).load_main(main)
    assert {"train", "Other", "Config"} <= main.keys()


@pytest.mark.parametrize("name", ["Guarded", "Whole.Part"])
def test_a_class_that_cannot_be_pickled_stays_out(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    program = run_as_main(OF_MAIN, monkeypatch)
    argument = code_pickle.attribute(program, name)()
    main: dict[str, Any] = {}
    function, args, _ = dump_call(program.train, (argument,), {}).load(main)
    assert function(*args) == ({"Guarded": "int"}.get(name, "Part"), 100_000)
    assert "train" in main


def test_an_unpicklable_argument_is_reported_with_its_cause() -> None:
    with pytest.raises(
        UnpicklableError, match=r"'add' .* argument 1\['guard'\] is a lock"
    ) as error:
        dump_call(add, (1, {"guard": LOCK}), {})
    assert isinstance(error.value, TypeError), "as with plain pickle"
    assert isinstance(error.value.__cause__, TypeError)
    assert error.value.__cause__.__context__ is None, "one error, though it was tried twice"


class Lazy(dict[str, Any]):
    """A dict of settings that are computed when they are used."""

    def __getitem__(self, key: str) -> Any:
        raise AssertionError(f"{key} was computed")

    values = items = __iter__ = __getitem__  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return dict, ([(key, dict.get(self, key)) for key in dict.keys(self)],)


class LazyMapping(Mapping[str, Any]):
    """A mapping whose values are computed when they are used."""

    def __init__(self) -> None:
        self.lock = LOCK

    def __getitem__(self, key: str) -> Any:
        raise AssertionError(f"{key} was computed")

    def __iter__(self) -> Iterator[str]:
        return iter(["lazy"])

    def __len__(self) -> int:
        return 1


def test_values_of_an_argument_are_not_computed() -> None:
    _, (loaded,), _ = dump_call(add, (Lazy(rate=0.1),), {}).load()
    assert loaded == {"rate": 0.1}
    with pytest.raises(UnpicklableError, match=r"argument 0\.lock is a lock"):
        dump_call(add, (LazyMapping(),), {})
    with pytest.raises(UnpicklableError, match=r"argument 1 is a lock"):
        dump_call(add, (Lazy(rate=0.1), LOCK), {})


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
        cells["Net"].bias = 100.0
        assert run()[0] == 105.0
        exec("def helper(): return 1.0", cells)
        assert run()[0] == 106.0
        cells["SCALE"], cells["Net"].bias = 1.0, 0.0
        exec("def helper(): return 0.0", cells)
        assert run()[0] == 1.0


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
        loaded = unpack(file.fileno())
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
