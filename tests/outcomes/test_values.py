"""Values that ranks return arrive whole, over both launchers.

The functions that ranks run are in this module and travel by value, as a notebook's code does.
"""

from __future__ import annotations

import collections
import enum
import math
import os
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
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
from support.waiting import runs

from distributor import (
    DistributorError,
    TorchDistributor,
    UnpicklableError,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

on_cluster = pytest.mark.spark(shared=True)


@dataclass
class Metrics:
    loss: float
    history: list[float]


@dataclass(frozen=True, slots=True)
class Frozen:
    loss: float = 0.5


class Slotted:
    __slots__ = ("__part", "__weakref__")

    def __init__(self, part: int) -> None:
        self.__part = part

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slotted) and self.__part == other.__part


class Phase(enum.Enum):
    WARM_UP = 1
    STEADY = 2


Point = collections.namedtuple("Point", "x y")


def make_large_tensors() -> dict[str, Any]:
    import torch

    return {f"layer{i}": torch.arange(5 * MIB, dtype=torch.float32) * (i + 1) for i in range(5)}


def kept_programs(argument: Any) -> dict[str, Any]:
    """Return the large programs in the folder of this rank's executor, by that folder."""
    mapped = next(line for line in open("/proc/self/maps") if "distributor-program" in line)
    folder = Path(mapped.split()[-1]).parent
    files = sorted((path.name, path.stat().st_ino) for path in folder.glob("distributor-program-*"))
    return {str(folder): files, "number": int(argument[0])}


def make_odd_tensors() -> dict[str, Any]:
    import torch

    return {
        "bfloat16": torch.arange(4, dtype=torch.bfloat16),
        "uint16": torch.arange(4).to(torch.uint16),
        "complex": torch.tensor([1 + 2j]),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "transposed": torch.arange(6).reshape(2, 3).T,
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


def make_module() -> Any:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 2)
            self.register_buffer("scale", torch.tensor([2.0]))

        def forward(self, inputs: Any) -> Any:
            return self.linear(inputs) * self.scale

    torch.manual_seed(11)
    return Net().eval()


def make_closure() -> Callable[[int], int]:
    offset = 40
    return lambda number: number + offset


def make_failing_value() -> Exception:
    return KeyError("returned, not raised", 3)


def same_tensors(value: Any, made: Any) -> None:
    import torch

    assert list(value) == list(made)
    for name, tensor in made.items():
        assert torch.equal(value[name], tensor), name
        assert (value[name].dtype, type(value[name])) == (tensor.dtype, type(tensor)), name
        assert value[name].requires_grad == tensor.requires_grad, name


def same_arrays(value: Any, made: Any) -> None:
    import numpy as np

    assert list(value) == list(made)
    for name, array in made.items():
        assert value[name].dtype == array.dtype, name
        assert np.array_equal(value[name], array), name


def same_outputs(value: Any, made: Any) -> None:
    import torch

    inputs = torch.ones(4, 3)
    assert isinstance(value, torch.nn.Module)
    assert torch.equal(value(inputs), made(inputs))
    assert list(value.state_dict()) == ["scale", "linear.weight", "linear.bias"]
    assert not value.training


def same_object(value: Any, made: Any) -> None:
    assert value is made


def same_error(value: Any, made: Any) -> None:
    assert type(value) is type(made)
    assert value.args == made.args


def same_function(value: Any, made: Any) -> None:
    assert isinstance(value, types.FunctionType)
    assert value(2) == made(2) == 42


def equal(value: Any, made: Any) -> None:
    assert type(value) is type(made)
    assert value == made


def make_arrays() -> dict[str, Any]:
    import numpy as np

    return {
        "plain": np.arange(1_000_000, dtype=np.float64).reshape(1000, 1000),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "structured": np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
        "strings": np.array(["a", "bc"]),
    }


def make_nested() -> dict[Any, Any]:
    rows = [{"step": i, "loss": 1 / (i + 1), "tags": ("a", {i, i + 1})} for i in range(50_000)]
    return {"rows": rows, "deep": [[[[[["bottom"]]]]]], 3: {None: frozenset({b"x"})}}


Same = Callable[[Any, Any], None]
VALUES: dict[str, tuple[Callable[[], Any], Same]] = {
    "none": (lambda: None, same_object),
    "true": (lambda: True, same_object),
    "int": (lambda: -(7**300), equal),
    "float": (lambda: 0.1 + 0.2, equal),
    "infinity": (lambda: -math.inf, equal),
    "complex": (lambda: 1 - 2j, equal),
    "str": (lambda: "naïve 日本 🚀 \ud800\0", equal),
    "bytes": (lambda: bytes(range(256)) * 20_000, equal),
    "nested": (make_nested, equal),
    "generated_list": (lambda: [i * i for i in (j for j in range(1000))], equal),
    "arrays": (make_arrays, same_arrays),
    "large_tensors": (make_large_tensors, same_tensors),
    "odd_tensors": (make_odd_tensors, same_tensors),
    "module": (make_module, same_outputs),
    "own_instance": (lambda: Metrics(0.5, [1.0, 0.5]), equal),
    "own_frozen_instance": (lambda: Frozen(0.25), equal),
    "own_slots": (lambda: Slotted(3), equal),
    "own_class": (lambda: Metrics, same_object),
    "own_enum": (lambda: Phase.STEADY, same_object),
    "namedtuple": (lambda: Point(1, y=[2]), equal),
    "closure": (make_closure, same_function),
    "lambda": (lambda: lambda number: number * 21, same_function),
    "exception": (make_failing_value, same_error),
}


@pytest.fixture(scope="module", params=["local", pytest.param("cluster", marks=on_cluster)])
def returned(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return every kind of value from rank 0 of one run."""
    if request.param == "cluster":
        request.getfixturevalue("spark")
    makers = {name: make for name, (make, _) in VALUES.items()}

    def program() -> Any:
        if my_rank() == 1:
            return "rank 1's"
        return {name: make() for name, make in makers.items()}

    distributor = TorchDistributor(
        2, local_mode=request.param == "local", use_gpu=False, timeout=180
    )
    return distributor.run(program)


@pytest.mark.parametrize("kind", VALUES)
def test_value_arrives_whole(returned: dict[str, Any], kind: str) -> None:
    make, same = VALUES[kind]
    same(returned[kind], make())


def test_a_class_of_the_caller_is_the_same_on_driver_and_ranks(
    distribute: Distribute,
) -> None:
    class Model:
        def __init__(self, weight: int) -> None:
            self.weight = weight

    def train(start: Model) -> Model:
        assert isinstance(start, Model)
        return Model(start.weight + 1)

    trained = distribute(1).run(train, Model(41))
    assert type(trained) is Model
    assert trained.weight == 42


@pytest.mark.parametrize(
    ("distribute", "order"),
    [
        ("local", (2, 1, 0)),
        ("local", (0, 2, 1)),
        pytest.param("cluster", (1, 2, 0), marks=on_cluster),
    ],
    indirect=["distribute"],
    ids=str,
)
def test_run_all_returns_each_ranks_value_in_whatever_order_they_end(
    distribute: Distribute, tmp_path: Path, order: tuple[int, ...]
) -> None:
    def end_in_order() -> tuple[int, int]:
        rank = my_rank()
        place = order.index(rank)
        if place:
            before = tmp_path / f"rank{order[place - 1]}"
            wait_until(before.exists, f"{before.name} ends")
            pid = int(before.read_text())
            if before.name != "rank0":  # which stays, to serve the others
                wait_until(lambda: not runs(pid), f"{before.name} is gone")
        aside = tmp_path / f"aside{rank}"
        aside.write_text(str(os.getpid()))
        aside.rename(tmp_path / f"rank{rank}")
        return rank, place

    values = distribute(3).run_all(end_in_order)
    assert values == [(rank, order.index(rank)) for rank in range(3)]


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


def test_tensors_whose_dtype_has_no_storage_class_are_arguments_and_values(
    distribute: Distribute,
) -> None:
    import torch

    bits = torch.arange(MIB, dtype=torch.int32)
    names = ("float8_e4m3fn", "uint16", "uint32", "uint64", "complex32")
    large = {name: bits.view(getattr(torch, name)) for name in names}
    small = {name: tensor[:2].clone() for name, tensor in large.items()}

    def program(large: dict[str, Any], *, small: dict[str, Any]) -> Any:
        addresses = {tensor.data_ptr() for tensor in large.values()}
        return len(addresses), large, small

    memories, *returned = distribute(1).run(program, large, small=small)

    assert memories == 1
    for given, found in zip((large, small), returned, strict=True):
        assert {name: tensor.dtype for name, tensor in found.items()} == {
            name: tensor.dtype for name, tensor in given.items()
        }
        for name, tensor in given.items():
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.spark
def test_the_large_arguments_that_were_used_last_are_kept(spark: Any) -> None:
    import torch
    from pyspark import SparkFiles

    distributor = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=120)

    def run(number: int) -> dict[str, Any]:
        argument = torch.full((MIB,), number, dtype=torch.uint8)
        found = distributor.run_all(kept_programs, argument)
        assert [each.pop("number") for each in found] == [number, number]
        return {folder: files for each in found for folder, files in each.items()}

    first = run(0)
    assert run(0) == first, "the same files: nothing was sent again"
    for number in range(1, 6):
        kept = run(number)
    assert {folder: len(files) for folder, files in kept.items()} == dict.fromkeys(first, 4)
    assert not set(first[min(first)]) & set(kept[min(first)]), "the oldest are gone"

    names = {name for name, _ in kept[min(first)]}
    for folder in (SparkFiles.getRootDirectory(), spark.sparkContext._temp_dir):
        on_driver = Path(folder).glob("distributor-program-*")
        assert {path.name for path in on_driver if path.stat().st_size} == names


def test_a_value_that_is_not_returned_need_not_be_picklable(distribute: Distribute) -> None:
    def locks() -> object:
        return "fine" if my_rank() == 0 else threading.Lock()

    assert distribute(2).run(locks) == "fine"


def train_model(how: str) -> int:
    import torch
    import torch.distributed as dist

    if how == "in one rank" and my_rank():
        return my_rank()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(1, 1)).sum().backward()
    for step in range(3):
        if how == "in a group" and step == 1:
            dist.init_process_group("gloo")
        optimizer.step()
    if how == "in a group":
        dist.destroy_process_group()
    return my_rank()


SCRIPT_THAT_TRAINS = """
import torch
weight = torch.ones(1, requires_grad=True)
weight.sum().backward()
torch.optim.SGD([weight], 0.1).step()
"""


@cluster_is_slow
@pytest.mark.parametrize("way", ["run", "submit", "script"])
def test_ranks_that_train_models_of_their_own_cost_one_warning(
    distribute: Distribute, tmp_path: Path, way: str, warned: Callable[[], list[str]]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT_THAT_TRAINS)
    {
        "run": lambda: distribute(2).run(train_model, "alone"),
        "submit": lambda: distribute(2).submit(train_model, "alone").result(),
        "script": lambda: distribute(2, warm=False).run(str(script)),
    }[way]()
    [warning] = warned()
    assert "in ranks 0, 1, but none of them has had a process group" in warning
    assert "the value of rank 0 is returned" in warning
    assert "\n    torch.distributed.init_process_group()\n    model = torch.nn" in warning


@pytest.mark.parametrize("how", ["in a group", "in one rank"])
def test_ranks_that_train_one_model_cost_no_warning(
    how: str, warned: Callable[[], list[str]]
) -> None:
    assert TorchDistributor(2, use_gpu=False, timeout=120).run(train_model, how) == 0
    assert warned() == []


def test_models_whose_values_are_all_returned_cost_no_warning(
    warned: Callable[[], list[str]],
) -> None:
    ranks = TorchDistributor(2, use_gpu=False, timeout=120)
    assert ranks.run_all(train_model, "alone") == [0, 1]
    assert warned() == []


def sharded_state() -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 4)
    fully_shard(model)
    return {"model": model.state_dict()}


def wrapped_model() -> Any:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return [torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))]


@pytest.mark.parametrize(
    ("make", "named", "line"),
    [
        (
            sharded_state,
            "value['model']['weight'] is a DTensor",
            "return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
            "cpu_offload=True))",
        ),
        (wrapped_model, "value[0] is a DistributedDataParallel", "return model.module,"),
    ],
)
def test_a_value_that_needs_the_other_ranks_is_refused(
    make: Callable[[], Any], named: str, line: str
) -> None:
    if make is sharded_state and not hasattr(
        import_module("torch.distributed.fsdp"), "fully_shard"
    ):
        pytest.skip("this torch has no fully_shard there")
    with pytest.raises(UnpicklableError) as error:
        TorchDistributor(2, use_gpu=False).run(make)
    assert named in str(error.value)
    assert line in str(error.value)


def test_a_value_from_a_module_that_the_driver_lacks_names_the_module(
    distribute: Distribute, tmp_path: Path
) -> None:
    (tmp_path / "only_in_ranks.py").write_text("class Result:\n    pass\n")

    def make() -> object:
        sys.path.insert(0, str(tmp_path))
        return __import__("only_in_ranks").Result()

    with pytest.raises(DistributorError, match=r"Rank 0 .* unpickled here.*only_in_ranks"):
        distribute(1).run(make)
