"""Where CUDA tensors land that are arguments, values or parts of exceptions: in CPU memory."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest
from support.cuda import device_type, needs_gpu

from distributor import TorchDistributor

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = needs_gpu
MIB = 2**20


@pytest.fixture
def runner() -> TorchDistributor:
    return TorchDistributor(2, local_mode=True, use_gpu=False, timeout=120)


def weights() -> dict[str, Any]:
    import torch

    big = torch.arange(2.0 * MIB, device=device_type())
    weight = torch.nn.Linear(4, 2).to(device_type()).weight
    return {"big": big, "part": big[5:10], "weight": weight}


def test_a_value_arrives_in_cpu_memory(runner: TorchDistributor) -> None:
    value = runner.run(weights)
    assert {tensor.device.type for tensor in value.values()} == {"cpu"}
    assert value["big"][-1] == 2 * MIB - 1
    value["big"][5] = -1.0
    assert value["part"][0] == -1.0, "tensors that share memory still do"


def total(tensors: dict[str, Any]) -> tuple[set[str], float]:
    return {each.device.type for each in tensors.values()}, float(tensors["big"].sum())


def test_arguments_reach_ranks_in_cpu_memory(runner: TorchDistributor) -> None:
    given = weights()
    expected = {"cpu"}, float(given["big"].cpu().sum())
    assert runner.run_all(total, given) == [expected, expected]
    assert given["big"].device.type == device_type(), "the driver's own stays where it is"


class BadBatch(Exception):
    pass


def fail() -> None:
    import torch

    raise BadBatch(torch.ones(2, device=device_type()))


def test_an_exception_brings_its_tensor_in_cpu_memory(runner: TorchDistributor) -> None:
    with pytest.raises(BadBatch) as caught:
        runner.run(fail)
    assert caught.value.args[0].device.type == "cpu"
    assert caught.value.args[0].tolist() == [1.0, 1.0]
