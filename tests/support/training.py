"""A training for fault injection: an event, a count and a rank select when a rank is killed.

It fits a line with float64, so that losses can be compared to the last bit. Each report has the
batch's samples; every second report has a checkpoint to which each rank adds a file.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from torch.utils.data import DataLoader, TensorDataset

from distributor import train
from distributor._compat.torch import OPTIMIZER_IMPORTS
from distributor.train import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
)
from distributor.train.storage.files import MANIFEST, RUN_LOG
from distributor.train.torch import TorchTrainer, prepare_data_loader, prepare_model

SAMPLES, BATCH, EPOCHS, SAVE_EVERY = 48, 3, 2, 2


@dataclass(frozen=True)
class Fault:
    """A fault that ends a rank once, when an event has occurred a number of times in its process.

    Parameters
    ----------
    event : str
        "step" (a batch begins), "upload", "check", "commit", "uncommit", "prune" or "record" (half
        of a file is written, or something is about to be read or removed), or "any" operation in
        storage.
    count, rank : int
        The occurrence of the event, from 1, and the rank that ends at it.
    marker : str
        A file that the fault creates. If it exists already, the fault is not injected.
    killed : bool
        Whether the rank kills itself; otherwise it waits until it is killed.
    """

    event: str
    count: int
    rank: int
    marker: str
    killed: bool = True


NONE = Fault("none", 0, 0, "")


class Events:
    """Counts the events of a fault in this process, and injects it."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._count = 0

    def is_due(self, event: str) -> bool:
        """Count an event, and return True if the fault is to be injected at it."""
        fault = self._fault
        if event != fault.event or os.environ.get("RANK") != str(fault.rank):
            return False
        self._count += 1
        return self._count == fault.count and not Path(fault.marker).exists()

    def record(self, event: str) -> None:
        """Count an event, and inject the fault if it is due."""
        if self.is_due(event):
            self.inject()

    def inject(self) -> None:
        """Create the marker, and kill this rank or wait to be killed."""
        Path(self._fault.marker).write_text(str(os.getpid()))
        if self._fault.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()


class HalfWrittenFile:
    """A file whose next write stores half of the data and then injects the fault."""

    def __init__(self, path: str, events: Events) -> None:
        self._file, self._events = open(path, "wb"), events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> None:
        self._file.write(bytes(data)[: len(data) // 2])
        self._file.flush()
        self._events.inject()


class FaultyFiles(pafs.FSSpecHandler):  # type: ignore[misc]
    """This machine's files, with the fault injected into an operation."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(LocalFileSystem())
        self._events = Events(fault)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        self._events.record("any")
        names = {MANIFEST: "commit", RUN_LOG: "record"}
        event = names.get(os.path.basename(path), "upload")
        if ".proof" not in path and self._events.is_due(event):
            return pa.PythonFile(HalfWrittenFile(path, self._events), mode="w")
        return super().open_output_stream(path, metadata)

    def get_file_info(self, paths: Any) -> Any:
        self._events.record("any")
        if any(path.endswith(".pt") for path in paths):
            self._events.record("check")
        return super().get_file_info(paths)

    def delete_dir(self, path: str) -> None:
        self._events.record("any")
        self._events.record("prune")
        super().delete_dir(path)

    def delete_file(self, path: str) -> None:
        self._events.record("any")
        if os.path.basename(path) == MANIFEST:
            self._events.record("uncommit")
        super().delete_file(path)


def fit_line(config: dict[str, Any]) -> list[float]:
    """Train from the latest checkpoint."""
    events = Events(config["fault"])
    torch.manual_seed(7)
    x = torch.arange(SAMPLES, dtype=torch.float64).reshape(-1, 1) / SAMPLES
    data = TensorDataset(torch.arange(SAMPLES), x, 3 * x + 1)
    loader = prepare_data_loader(DataLoader(data, batch_size=BATCH, shuffle=True))
    model = prepare_model(torch.nn.Linear(1, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = getattr(model, "module", model)
    epoch, step = _load(plain, optimizer)
    for current in range(epoch, EPOCHS):
        loader.sampler.set_epoch(current)
        for which, inputs, targets in loader:
            events.record("step")
            optimizer.zero_grad()
            loss = ((model(inputs) - targets) ** 2).mean()
            loss.backward()
            optimizer.step()
            step += 1
            metrics = {"loss": loss.item(), "step": step, "epoch": current, "samples": _all(which)}
            _report(metrics, plain, optimizer)
            if step == config["stop_at"]:
                return [step]
    return [parameter.item() for parameter in plain.parameters()]


def _load(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    found = train.get_checkpoint()
    if found is None:
        return 0, 0
    with found.as_directory() as folder:
        state = torch.load(Path(folder, "rank0.pt"))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"], state["step"]


def _all(which: torch.Tensor) -> list[int]:
    """Return the samples of all ranks."""
    shares = [torch.empty_like(which) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, which)
    samples: list[int] = torch.cat(shares).tolist()
    return samples


def _report(
    metrics: dict[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    if metrics["step"] % SAVE_EVERY:
        train.report(metrics)
        return
    rank = train.get_context().get_world_rank()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **metrics}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, f"{folder}/rank{rank}.pt")
        train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def here(num_workers: int | tuple[int, int] = 1) -> ScalingConfig:
    """Return the configuration of ranks on this machine, also if there is a Spark session."""
    return ScalingConfig(num_workers=num_workers, local_mode=True)


def trainer(
    folder: str | os.PathLike[str],
    name: str = "line",
    workers: int | tuple[int, int] = 2,
    failures: int = 0,
    local_mode: bool = True,
    fault: Fault = NONE,
    settings: Mapping[str, object] | None = None,
    stop_at: int | None = None,
) -> TorchTrainer:
    """Return a trainer; the fault is injected into its storage, too."""
    return TorchTrainer(
        fit_line,
        train_loop_config={"fault": fault, "stop_at": stop_at},
        scaling_config=ScalingConfig(num_workers=workers, local_mode=local_mode),
        run_config=RunConfig(
            name=name,
            storage_path=folder,
            storage_filesystem=pafs.PyFileSystem(FaultyFiles(fault)),
            failure_config=FailureConfig(max_failures=failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            settings={
                "timeout": 120,
                "show_output": "none",
                # Most of the CPU time of a local rank; executors have their zygotes already.
                "preload": OPTIMIZER_IMPORTS if local_mode else (),
                **(settings or {}),
            },
        ),
    )


def curve(result: Result) -> list[float]:
    """Return the losses in the order of the reports."""
    return [report.metrics["loss"] for report in result.reports]


def samples(result: Result, epoch: int) -> list[int]:
    """Return the samples that were trained in an epoch."""
    reports = [each.metrics for each in result.reports if each.metrics["epoch"] == epoch]
    return [sample for metrics in reports for sample in metrics["samples"]]
