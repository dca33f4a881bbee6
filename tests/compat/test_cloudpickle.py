"""A canary for what `distributor._compat.cloudpickle` uses that no other test would notice."""

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
