"""In ranks, the main module has what a function needs of the driver's, as it has everywhere."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from conftest import cluster_is_slow
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


@pytest.mark.parametrize("kind", ["function", "bound method"])
@cluster_is_slow
def test_classes_of_the_main_program_are_found_by_name(
    main: Main, distribute: Distribute, kind: str
) -> None:
    program = main(NAMES)
    function = program.facts if kind == "function" else program.Trainer().run
    parts = program.Outer.Part(), program.bootstrap(), program.json()
    facts = distribute(1).run(function, program.Config(), *parts)
    assert facts == [True, True, [True, True, True], True, True, True, True, True]


@cluster_is_slow
def test_values_and_errors_are_of_the_driver_s_own_classes(
    main: Main, distribute: Distribute
) -> None:
    program = main("""
    class State:
        registry = []
        def add(self): self.registry.append(1)

    class Trouble(Exception): ...

    class Kind(State):
        made = []
        def __init_subclass__(cls): Kind.made.append(cls)

    class Own(Kind): ...

    class Missing:
        def __reduce__(self): return "MISSING"

    MISSING = Missing()

    def make(fails):
        State().add()
        if fails:
            raise Trouble("in a rank")
        return State(), MISSING, Own()
    """)
    add, registry = program.State.add, program.State.registry
    state, missing, own = distribute(1).run(program.make, False)
    assert (type(state), type(own)) == (program.State, program.Own)
    assert missing is program.MISSING
    assert program.Kind.made == [program.Own]
    with pytest.raises(program.Trouble, match="in a rank"):
        distribute(1).run(program.make, True)
    assert program.State.add is add, "the class is the driver's, not a copy of the rank's"
    assert program.State.registry is registry
    assert registry == []
