"""A training function with MLflow calls, run by the decorator, is one MLflow run."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest
import torch
from support.tracking_server import mlflow, needs_mlflow, runs_of

from distributor import distributed

pytestmark = needs_mlflow
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Perceptron(torch.nn.Sequential):
    """A small model, defined beside the training function as in a notebook."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(
            torch.nn.Linear(10, width),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(width, 1),
        )


def fit(epochs: int, batch_size: int) -> float:
    """Train as users of ``serverless_gpu`` do, with MLflow calls in the function."""
    import mlflow
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    model = DistributedDataParallel(Perceptron())
    data = TensorDataset(torch.randn(400, 10), torch.randn(400, 1))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size, sampler=sampler)
    optimizer, total = torch.optim.Adam(model.parameters()), 0.0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            mlflow.log_metric("loss", loss.item(), step=step)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        mlflow.log_metric("total_loss", total, step=epoch)
    dist.destroy_process_group()
    return total


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize(
    "remote", [False, pytest.param(True, marks=pytest.mark.spark(shared=True))]
)
def test_training_by_the_decorator_is_one_run(
    experiment: str, request: pytest.FixtureRequest, gpus: int, remote: bool
) -> None:
    if remote:
        request.getfixturevalue("spark")
    trained = distributed(gpus=gpus, remote=remote, use_gpu=False, timeout=120)(fit)

    totals = trained.distributed(epochs=2, batch_size=25)

    [run] = runs_of(experiment)
    history = mlflow.MlflowClient().get_metric_history
    steps = 400 // 25 // gpus
    assert len(history(run.info.run_id, "loss")) == 2 * steps
    assert [m.step for m in history(run.info.run_id, "total_loss")] == [0, 1]
    assert run.data.metrics["total_loss"] == pytest.approx(totals[0])
    assert len(totals) == gpus
