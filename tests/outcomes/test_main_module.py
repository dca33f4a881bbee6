"""In ranks, the main module has what a function needs of the driver's, as it has everywhere."""

from __future__ import annotations

import functools
import sys
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from conftest import cluster_is_slow, facts_in
from support.ranks import Distribute

Main = Callable[[str], Any]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Main:
    """Return a function that runs a program as the main module of this process."""

    def run(source: str) -> ModuleType:
        module = ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", module)
        exec(compile(textwrap.dedent(source), "<cell>", "exec", dont_inherit=True), vars(module))
        return module

    return run


NAMES = """
from __future__ import annotations
import dataclasses, pickle, sys
from typing import Optional, get_type_hints

@dataclasses.dataclass
class Inner:
    value: int = 1

@dataclasses.dataclass
class Config:
    inner: Inner = dataclasses.field(default_factory=Inner)
    path: Optional[str] = None

class Base: ...
class State(Base): ...
class Outer:
    class Part: ...
class bootstrap: ...
class json: ...

COUNT = 0

def copy(value):
    return pickle.loads(pickle.dumps(value))

def increase():
    global COUNT
    COUNT += 1

class Trainer:
    def __call__(self, *args): return facts(*args)
    def run(self, *args): return [copy(self), *facts(*args)][1:]

def facts(config: Config, *parts) -> Unknown:
    import __main__
    increase()
    return [
        copy(config) == config == Config(),
        get_type_hints(type(config)) == {"inner": type(config.inner), "path": Optional[str]},
        [type(copy(part)) is type(part) for part in parts],
        type(copy(State())) is State and copy(Base) is Base,
        __main__ is sys.modules["__mp_main__"] and __main__.__name__ == "__main__",
        __main__.COUNT == COUNT == 1,
        sorted({"sys", "exit_handlers", "atexit"} & vars(__main__).keys()) == ["sys"],
        [f.default is dataclasses.MISSING for f in dataclasses.fields(config)] == [True, False],
    ]
"""


@pytest.mark.parametrize("kind", ["function", "callable object", "bound method", "partial"])
def test_classes_of_the_main_program_are_found_by_name(
    main: Main, distribute: Distribute, kind: str
) -> None:
    program = main(NAMES)
    function = {
        "function": program.facts,
        "callable object": program.Trainer(),
        "bound method": program.Trainer().run,
        "partial": functools.partial(program.facts),
    }[kind]
    parts = program.Outer.Part(), program.bootstrap(), program.json()
    facts = distribute(1).run(function, program.Config(), *parts)
    assert facts == [True, True, [True, True, True], True, True, True, True, True]


def test_a_trainer_s_config_is_found_by_name(main: Main) -> None:
    from distributor.train import ScalingConfig
    from distributor.train.torch import TorchTrainer

    program = main(
        NAMES
        + textwrap.dedent("""
        def loop(config):
            assert facts(config["config"], config["part"])[2] == [True]
        """)
    )
    TorchTrainer(
        program.loop,
        train_loop_config={"config": program.Config(), "part": program.Outer.Part()},
        scaling_config=ScalingConfig(num_workers=1, local_mode=True),
    ).fit()


def test_values_and_errors_are_of_the_driver_s_own_classes(
    main: Main, distribute: Distribute
) -> None:
    program = main("""
    class State:
        registry = []
        def add(self):
            self.registry.append(1)
            return len(self.registry)

    class Trouble(Exception):
        pass

    class Kind(State):
        made = []
        def __init_subclass__(cls):
            Kind.made.append(cls)

    class Own(Kind):
        pass

    class Missing:
        def __reduce__(self):
            return "MISSING"

    MISSING = Missing()

    def make(fails):
        State().add()
        if fails:
            raise Trouble("in a rank")
        return State(), MISSING, Own()
    """)
    add, registry = program.State.add, program.State.registry
    state, missing, own = distribute(1).run(program.make, False)
    assert type(state) is program.State
    assert missing is program.MISSING
    assert type(own) is program.Own
    assert program.Kind.made == [program.Own]
    with pytest.raises(program.Trouble, match="in a rank"):
        distribute(1).run(program.make, True)
    assert program.State.add is add, "the class is the driver's, not a copy of the rank's"
    assert program.State.registry is registry
    assert registry == []
    assert state.add() == 1


FUNCTOOLS = """
import functools, typing

@functools.lru_cache(maxsize=3)
def vocabulary(): return ["a", "b"]

@functools.cache
def factorial(n): return n * factorial(n - 1) if n else 1

@functools.singledispatch
def encoded(value): return "any"

@encoded.register
def _(value: int): return "int"

@encoded.register(list)
def _(value): return [encoded(each) for each in value]

class Model:
    @functools.cached_property
    def size(self): return 1
    @functools.lru_cache
    def layers(self): return 2
    @functools.singledispatchmethod
    def add(self, value): return "any"
    @add.register
    def _(self, value: int): return "int"

UserId = typing.NewType("UserId", int)
P = typing.ParamSpec("P")

def logged(function: typing.Callable[P, int]) -> typing.Callable[P, int]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> int: return function(*args, **kwargs)
    return call

@logged
def user() -> UserId: return UserId(7)

def train(model):
    return [
        vocabulary(), vocabulary() is vocabulary(), vocabulary.cache_parameters()["maxsize"],
        factorial(5), factorial.cache_info().currsize,
        encoded(3), encoded([1, "b"]), encoded.dispatch(int) is encoded.registry[int],
        model.size, model.layers(), model.add(1), model.add(""), user(),
    ]
"""


def test_cached_and_dispatching_functions_run_in_ranks(main: Main, distribute: Distribute) -> None:
    program = main(FUNCTOOLS)
    expected = [["a", "b"], True, 3, 120, 6, "int", ["int", "any"], True, 1, 2, "int", "any", 7]
    assert distribute(1).run(program.train, program.Model()) == expected
    assert distribute(1).run(program.vocabulary) == ["a", "b"]
    assert program.factorial.cache_info().currsize == 0


CLASS_BODIES = """
from fractions import Fraction

RATE = 3

def doubled(value): return 2 * value

def train():
    class Options:
        rate = doubled(RATE)
        class Nested:
            half = Fraction(1, 2)
        def scaled(self, by: Fraction = Fraction(RATE)) -> Fraction: return by * self.rate
    return [Options.rate, Options.Nested.half, Options().scaled()]
"""


@cluster_is_slow
def test_bodies_of_classes_in_a_function_find_globals(main: Main, distribute: Distribute) -> None:
    program = main(CLASS_BODIES)
    assert distribute(1).run(program.train) == program.train() == [6, 0.5, 18]


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_run_in_a_process_that_multiprocessing_started(run_driver: Any, method: str) -> None:
    done = run_driver(
        f"""
        import json, multiprocessing, pickle
        from distributor import TorchDistributor

        RATE = 2

        class Result:
            def __init__(self, rate): self.rate = rate

        def train(rate):
            return pickle.loads(pickle.dumps(Result(rate * RATE)))

        def trial(rate):
            distributor = TorchDistributor(1, local_mode=True, use_gpu=False, warm=False)
            result = distributor.run(train, rate)
            return result.rate, type(result) is Result

        if __name__ == "__main__":
            with multiprocessing.get_context("{method}").Pool(1) as pool:
                print("FACTS " + json.dumps({{"trials": pool.map(trial, [1, 2])}}))
        """
    )
    assert facts_in(done) == {"trials": [[2, True], [4, True]]}
