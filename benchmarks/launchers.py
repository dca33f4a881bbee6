"""The launchers that are measured; each yields a function ``run(function, *args)``.

Imports and sessions, which a user needs once, are set up before it is yielded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.floors import CALL, target
from benchmarks.packages import library
from benchmarks.programs.call import ARGUMENTS, VALUE
from benchmarks.spark import IN_DRIVER, LOCAL, session

Run = Callable[..., Any]

AHEAD_SECONDS = 2.0


@contextmanager
def ours(place: str, ranks: int, **settings: Any) -> Iterator[Run]:
    """Build this project's distributor for each run."""
    from distributor import TorchDistributor

    def run(function: Run, *args: Any) -> Any:
        distributor = TorchDistributor(ranks, local_mode=place == LOCAL, use_gpu=False, **settings)
        return distributor.run(function, *args)

    with session(place):
        yield run


@contextmanager
def ours_cold(place: str, ranks: int) -> Iterator[Run]:
    """Build this project's distributor without the warm process."""
    with ours(place, ranks, warm=False) as run:
        yield run


@contextmanager
def ours_ordinary(place: str, ranks: int) -> Iterator[Run]:
    """Build this project's distributor for the tasks of an ordinary job."""
    with ours(place, ranks, barrier=False) as run:
        yield run


@contextmanager
def ours_ahead(place: str, ranks: int) -> Iterator[Run]:
    """Start the warm process some seconds before the first run, as a notebook can."""
    from distributor import TorchDistributor, warm_up

    with session(place):
        distributor = TorchDistributor(ranks, local_mode=place == LOCAL, use_gpu=False)
        warm_up(distributor)
        time.sleep(AHEAD_SECONDS)
        yield distributor.run


@contextmanager
def pyspark(place: str, ranks: int) -> Iterator[Run]:
    """Build PySpark's distributor for each run; its local mode needs a session too."""
    from pyspark.ml.torch.distributor import TorchDistributor

    def run(function: Run, *args: Any) -> Any:
        distributor = TorchDistributor(ranks, local_mode=place == LOCAL, use_gpu=False)
        return distributor.run(function, *args)

    with session(IN_DRIVER if place == LOCAL else place):
        yield run


@contextmanager
def torchrun(place: str, ranks: int) -> Iterator[Run]:
    """Run torchrun's command, with files for arguments and value."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks)]

        def run(function: Run, *args: Any) -> Any:
            import torch

            if args:
                torch.save(args, Path(folder, ARGUMENTS))
            subprocess.run([*command, CALL, target(function), folder], check=True)
            return torch.load(Path(folder, VALUE), weights_only=False)

        yield run


@contextmanager
def ray_cluster(ranks: int) -> Iterator[None]:
    """Start Ray on this machine, with room for the ranks and what controls them."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    package = library("ray")
    package.init(
        num_cpus=ranks + 2, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    try:
        yield
    finally:
        package.shutdown()


@contextmanager
def ray(place: str, ranks: int) -> Iterator[Run]:
    """Run with Ray Train in a running Ray."""
    with tempfile.TemporaryDirectory() as folder, ray_cluster(ranks):
        train, trainer = library("ray.train"), library("ray.train.torch").TorchTrainer

        def run(function: Run, *args: Any) -> None:
            fitted = trainer(
                lambda: function(*args) and None,
                scaling_config=train.ScalingConfig(num_workers=ranks),
                run_config=train.RunConfig(storage_path=folder),
            )
            fitted.fit()

        yield run
