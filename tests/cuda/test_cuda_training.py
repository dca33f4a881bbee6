"""Training on a GPU: models and batches on it, FSDP2, and checkpoints that are saved from it."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest
from support.cuda import device_type, needs_gpu

from distributor import TorchDistributor

pytest.importorskip("pyarrow", reason="needs pyarrow")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = needs_gpu
ROWS = 64


@pytest.fixture
def runner() -> TorchDistributor:
    """Return a distributor of one rank, which has the GPU to itself."""
    use_gpu = device_type() == "cuda"
    return TorchDistributor(1, local_mode=True, use_gpu=use_gpu, timeout=300)


def start_group() -> None:
    import torch.distributed as dist

    # Asynchronous checkpoints need a backend for CPUs too.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device_type() == "cuda" else "gloo")


def network() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device_type())


def train_prepared() -> dict[str, Any]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from distributor.train.torch import get_device, prepare_data_loader, prepare_model

    inputs = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = prepare_model(network().cpu())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    places, losses = set(), []
    for _ in range(20):
        for features, targets in prepare_data_loader(DataLoader(dataset, batch_size=16)):
            places |= {features.device, targets.device}
            loss = torch.nn.functional.mse_loss(model(features), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    parameters = {parameter.device for parameter in model.parameters()}
    return {
        "batches": sorted(map(str, places)),
        "parameters": sorted(map(str, parameters)),
        "device": str(get_device()),
        "fell": losses[-1] < losses[0] / 2,
    }


def test_prepared_models_and_batches_are_on_the_ranks_gpu(runner: TorchDistributor) -> None:
    device = "cuda:0" if device_type() == "cuda" else "cpu"
    assert runner.run(train_prepared) == {
        "batches": [device],
        "parameters": [device],
        "device": device,
        "fell": True,
    }


def train_sharded() -> dict[str, Any]:
    """Train with FSDP2 and mixed precision."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    start_group()
    model = network()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.randn(ROWS, 16, device=device_type())
    outputs, losses = model(inputs), []
    for _ in range(30):
        outputs = model(inputs)
        loss = (outputs.float() - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {
        "outputs": str(outputs.dtype),
        "parameters": {parameter.to_local().device.type for parameter in model.parameters()},
        "fell": losses[-1] < losses[0],
    }


def test_fsdp2_with_mixed_precision(runner: TorchDistributor) -> None:
    assert runner.run(train_sharded) == {
        "outputs": "torch.bfloat16",
        "parameters": {device_type()},
        "fell": True,
    }
