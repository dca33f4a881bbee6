"""Values that ranks return arrive whole, over both launchers.

The functions that ranks run are in this module and travel by value, as a notebook's code does.
"""

from __future__ import annotations

import enum
import math
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from conftest import cluster_is_slow
from support.ranks import (
    MIB,
    Distribute,
    my_rank,
    wait_until,
)

from distributor import (
    DistributorError,
    TorchDistributor,
    UnpicklableError,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclass
class Metrics:
    loss: float
    history: list[float]


class Slotted:
    __slots__ = ("__part", "__weakref__")

    def __init__(self, part: int) -> None:
        self.__part = part

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slotted) and self.__part == other.__part


class Phase(enum.Enum):
    WARM_UP = 1
    STEADY = 2


def make_values() -> dict[str, Any]:
    """Make a value of every kind."""
    import numpy as np
    import torch

    offset = 40
    rows = [{"step": i, "loss": 1 / (i + 1), "tags": ("a", {i, i + 1})} for i in range(50_000)]
    return {
        "none": None,
        "int": -(7**300),
        "infinity": -math.inf,
        "str": "naïve 日本 🚀 \ud800\0",
        "bytes": bytes(range(256)) * 20_000,
        "nested": {"rows": rows, "deep": [[[["bottom"]]]], "set": frozenset({b"x"})},
        "array": np.arange(1_000_000, dtype=np.float64).reshape(1000, 1000),
        "records": np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
        "tensors": {f"layer{i}": torch.arange(5.0 * MIB) * (i + 1) for i in range(5)},
        "own_instance": Metrics(0.5, [1.0, 0.5]),
        "own_slots": Slotted(3),
        "own_class": Metrics,
        "own_enum": Phase.STEADY,
        "closure": lambda number: number + offset,
    }


def assert_same(value: Any, made: Any) -> None:
    assert type(value) is type(made)
    if isinstance(made, dict):
        assert list(value) == list(made)
        for key, part in made.items():
            assert_same(value[key], part)
    elif hasattr(made, "dtype"):
        assert (value.dtype, value.shape) == (made.dtype, made.shape)
        assert (value == made).all()
    elif isinstance(made, types.FunctionType):
        assert value(2) == made(2) == 42
    else:
        assert value == made


def test_values_arrive_whole(distribute: Distribute) -> None:
    make = make_values

    def program() -> Any:
        return make() if my_rank() == 0 else "rank 1's"

    assert_same(distribute(2, timeout=180).run(program), make_values())


@cluster_is_slow
def test_run_all_returns_each_ranks_value_in_whatever_order_they_end(
    distribute: Distribute, tmp_path: Path
) -> None:
    def end_after_the_next() -> int:
        rank = my_rank()
        wait_until(lambda: rank == 2 or (tmp_path / str(rank + 1)).exists(), "the next one ends")
        (tmp_path / str(rank)).touch()
        return rank

    assert distribute(3).run_all(end_after_the_next) == [0, 1, 2]


@cluster_is_slow
def test_exiting_with_code_0_succeeds_and_returns_none(distribute: Distribute) -> None:
    def leave() -> str:
        if my_rank() == 2:
            return "stayed"
        sys.exit(0 if my_rank() == 0 else None)

    assert distribute(3).run_all(leave) == [None, None, "stayed"]


def test_large_arguments_are_sent_once_and_are_each_ranks_own(
    distribute: Distribute, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    import torch

    weights = torch.arange(2.0 * MIB)

    def program(given: dict[str, Any], *, sign: int) -> float:
        given["weights"] *= sign * (my_rank() + 1)
        return float(given["weights"][-1])

    last = 2.0 * MIB - 1
    distributor = distribute(2)

    def sent() -> set[str]:
        return set(request.getfixturevalue("spark").sparkContext.listFiles)

    before = set() if distributor.local_mode else sent()
    for sign in (1, 1, -1):
        found = distributor.run_all(program, {"weights": weights, "small": 1}, sign=sign)
        assert found == [sign * last, sign * 2 * last]
    assert weights[-1] == last, "the driver's own is as it was"
    shown = capfd.readouterr().err
    if distributor.local_mode:
        assert "'program' takes" not in shown
        return
    named = "'program' takes 8.39 MB to the ranks, 8.39 MB of it in argument 0['weights']."
    assert shown.count(named) == 3
    assert sum("program" in name for name in sent() - before) == 2


@cluster_is_slow
def test_a_value_that_is_not_returned_need_not_be_picklable(distribute: Distribute) -> None:
    def locks() -> object:
        return "fine" if my_rank() == 0 else threading.Lock()

    assert distribute(2).run(locks) == "fine"


def train_model(in_a_group: bool) -> int:
    import torch
    import torch.distributed as dist

    weight = torch.ones(1, requires_grad=True)
    weight.sum().backward()
    if in_a_group:
        dist.init_process_group("gloo")
    torch.optim.SGD([weight], 0.1).step()
    return my_rank()


@cluster_is_slow
def test_ranks_that_train_models_of_their_own_cost_one_warning(
    distribute: Distribute, warned: Callable[[], list[str]]
) -> None:
    assert distribute(2).run(train_model, True) == 0
    assert warned() == [], "they train one model"
    distribute(2).run(train_model, False)
    [warning] = warned()
    assert "in ranks 0, 1, but none of them has had a process group" in warning
    assert "the value of rank 0 is returned" in warning


def wrapped_model() -> Any:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return [torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))]


def test_a_value_that_needs_the_other_ranks_is_refused() -> None:
    with pytest.raises(UnpicklableError, match=r"value\[0\] is a DistributedDataParallel") as error:
        TorchDistributor(2, use_gpu=False).run(wrapped_model)
    assert "return model.module," in str(error.value)


@cluster_is_slow
def test_a_value_from_a_module_that_the_driver_lacks_names_the_module(
    distribute: Distribute, tmp_path: Path
) -> None:
    (tmp_path / "only_in_ranks.py").write_text("class Result:\n    pass\n")

    def make() -> object:
        sys.path.insert(0, str(tmp_path))
        return __import__("only_in_ranks").Result()

    with pytest.raises(DistributorError, match=r"Rank 0 .* unpickled here.*only_in_ranks"):
        distribute(1).run(make)
