"""``distributor demo``: DDP training on real images, locally and on an embedded Spark cluster."""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from distributor.core.text import aligned
from distributor.core.versions import require_spark
from distributor.spark.application import no_warning, why_no_java
from distributor.torch_distributor import TorchDistributor

EPOCHS_PER_LINE = 3
"""Number of epochs after which rank 0 prints the loss."""
NEXT_STEPS = """
What to try next:
  distributor run --nproc 2 --cpu train.py               your own script, on this machine
  distributor run --nproc 2 --cpu -m package.train       a module, as with python -m
  distributor run --cluster --master spark://HOST:7077 --nproc 16 train.py
                                                         the same on a Spark cluster
  TorchDistributor(16, local_mode=False).run(train)      a function, from a notebook or a job
  distributor run --help                                 all settings"""


def train(epochs: int = 15, batch_size: int = 32) -> float:
    """Train a small network on scikit-learn's digits with DDP. Every rank runs this function."""
    import socket

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {world_size} on {socket.gethostname()}")
    torch.manual_seed(0)
    images, labels, test_images, test_labels = _digits()
    dataset = TensorDataset(images, labels)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(1, epochs + 1):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for batch, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), target)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0 and epoch % EPOCHS_PER_LINE == 0:
            print(f"epoch {epoch:2}  loss {total.item() / len(loader) / world_size:.4f}")
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    dist.destroy_process_group()
    return float(accuracy)


def _digits() -> tuple[Any, Any, Any, Any]:
    """Load 1,797 images of 8 by 8 pixels; every fifth image is a test image."""
    import torch
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    data = torch.tensor(images, dtype=torch.float32) / 16
    target = torch.tensor(labels)
    held_out = torch.arange(len(data)) % 5 == 0
    return data[~held_out], target[~held_out], data[held_out], target[held_out]


def demo() -> None:
    """Train on two local ranks, then on two ranks of an embedded Spark cluster."""
    try:
        import sklearn  # noqa: F401
    except ImportError:
        raise RuntimeError(
            "The demo needs the images of scikit-learn: pip install scikit-learn"
        ) from None
    host = socket.gethostname()
    rows = [("training", "where", "test accuracy", "time")]
    rows.append(_train("two local ranks", host, local_mode=True))
    try:
        require_spark()
        lack = why_no_java()  # empty if Spark can start
    except ModuleNotFoundError as error:
        lack = str(error)
    if not lack:
        with _embedded_spark():
            rows.append(_train("two ranks on Spark", f"2 executors, {host}", local_mode=False))
    print("\n" + _table(rows))
    if lack:
        print(f"\n{lack} Then run the demo again.")
    print(NEXT_STEPS)


def _train(name: str, where: str, *, local_mode: bool) -> tuple[str, str, str, str]:
    print(f"\nTraining on {name}", flush=True)
    began = time.perf_counter()
    accuracy = TorchDistributor(num_processes=2, local_mode=local_mode, use_gpu=False).run(train)
    return name, where, f"{accuracy:.4f}", f"{time.perf_counter() - began:.1f} s"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    rules = ["-" * max(map(len, column)) for column in zip(*rows, strict=True)]
    return aligned([rows[0], rules, *rows[1:]])


@contextmanager
def _embedded_spark() -> Iterator[None]:
    """Start Spark on this machine; show what its JVM has logged only if it does not start."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    print("\nStarting an embedded Spark cluster")
    conf = SparkConf().setAppName("distributor demo").setMaster("local-cluster[2,1,1024]")
    conf.set("spark.ui.enabled", "false").set("spark.ui.showConsoleProgress", "false")
    with tempfile.TemporaryFile() as log:
        try:
            with no_warning():
                gateway = launch_gateway(conf, popen_kwargs={"stderr": log})  # type: ignore[no-untyped-call]
                spark = SparkSession(SparkContext(conf=conf, gateway=gateway))
        except Exception:
            log.seek(0)
            print(log.read().decode(errors="replace"), file=sys.stderr)
            raise
        with spark:
            yield
