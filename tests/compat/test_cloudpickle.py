"""Canaries for what `distributor._compat.cloudpickle` uses of cloudpickle."""

from __future__ import annotations

import io
import pickle
from types import FunctionType
from typing import Any

import cloudpickle
import pytest
from support.canary import relies_on

from distributor._compat import cloudpickle as private

pytestmark = pytest.mark.repository


def test_functions_get_another_namespace() -> None:
    program: dict[str, Any] = {"__name__": "__main__", "step": 2}
    exec("def first(): return step\ndef second(): return step", program)
    file = io.BytesIO()
    pickler = cloudpickle.Pickler(file)
    with relies_on("cloudpickle", "Pickler.globals_ref", "cloudpickle.use_as_globals"):
        private.use_as_globals(pickler, program, {"__file__": "other.py"})
        pickler.dump((program["first"], program["second"]))
        first, second = pickle.loads(file.getvalue())
        assert first() == second() == 2
        assert first.__globals__ is second.__globals__
        assert first.__globals__["__file__"] == "other.py"


class _WithRate(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if not isinstance(obj, FunctionType) or reduced is NotImplemented:
            return reduced
        return private.with_globals(reduced, {"rate": 3})


def test_a_function_gets_further_globals() -> None:
    program: dict[str, Any] = {"__name__": "__main__", "step": 2}
    exec("def product(): return step * eval('rate')", program)
    file = io.BytesIO()
    with relies_on("cloudpickle", "how it reduces functions", "cloudpickle.with_globals"):
        _WithRate(file).dump(program["product"])
        assert pickle.loads(file.getvalue())() == 6


KNOWN: list[type | None] = []


def make(own: Any, *args: Any) -> type:
    KNOWN.append(private.known_class(args))
    made: type = own(*args)
    return made


def set_attributes(made: Any, values: tuple[Any, Any, str]) -> None:
    own, state, argument = values
    own(made, state)
    made.argument = argument


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and reduced is not NotImplemented:
            return private.with_functions(reduced, make, set_attributes, "given")
        return reduced


def test_a_class_is_made_by_other_functions() -> None:
    class Local:
        value = 7

    file = io.BytesIO()
    with relies_on("cloudpickle", "how it reduces classes", "cloudpickle.with_functions"):
        _Pickler(file).dump((Local, type(None)))
        loaded, none = pickle.loads(file.getvalue())
        assert (loaded.value, loaded.argument, none) == (7, "given", type(None))
        assert [loaded] == KNOWN == [Local]
