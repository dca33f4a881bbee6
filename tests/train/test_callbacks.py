"""Callbacks and listeners, which the driver calls while a training runs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.reports import save
from support.training import here

from distributor import Listener, RunTimeout, TorchDistributor, runtime, train
from distributor.control import sink as listeners
from distributor.rank.messages import Progress, Reported
from distributor.train import FailureConfig, RunConfig, UserCallback
from distributor.train.torch import TorchTrainer

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class RecordingCallback(UserCallback):
    """Records the calls that it receives, and may end the training at a checkpoint."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.reports: list[tuple[list[dict[str, Any]], str | None]] = []
        self.exceptions: list[dict[int, Exception]] = []
        self.error = error

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        assert run_context.get_run_config().name == "run"
        self.reports.append((metrics, checkpoint and Path(checkpoint.path).name))
        if checkpoint is not None and self.error is not None:
            raise self.error

    def after_exception(self, run_context: Any, worker_exceptions: Any) -> None:
        self.exceptions.append(worker_exceptions)


def report_and_fail_once(folder: Path) -> None:
    rank = train.get_context().get_world_rank()
    resumed = train.get_checkpoint() is not None
    train.report({"rank": rank})
    train.report({"rank": rank}, checkpoint=save(folder, "x"))
    if not resumed and rank == 1:
        raise KeyError("lost")


def fit(folder: Path, callback: UserCallback) -> None:
    TorchTrainer(
        lambda: report_and_fail_once(folder / "local"),
        scaling_config=here(2),
        run_config=RunConfig(
            name="run",
            storage_path=folder,
            failure_config=FailureConfig(max_failures=1),
            callbacks=[callback],
            settings={"show_output": "none", "timeout": 120},
        ),
    ).fit()


def test_callbacks_receive_the_reports_and_failures_of_all_ranks(tmp_path: Path) -> None:
    recorder = RecordingCallback()
    fit(tmp_path, recorder)
    metrics = [{"rank": 0}, {"rank": 1}]
    checkpoints = [None, "checkpoint_000000", None, "checkpoint_000001"]
    assert recorder.reports == [(metrics, checkpoint) for checkpoint in checkpoints]
    (raised,) = recorder.exceptions
    assert isinstance(raised[1], KeyError)


def test_an_exception_from_a_callback_ends_the_training(tmp_path: Path) -> None:
    error = StopIteration("enough")
    with pytest.raises(train.ControllerError, match="enough") as failed:
        fit(tmp_path, RecordingCallback(error))
    assert failed.value.__cause__ is failed.value.controller_failure is error
    result = train.Result.from_path(tmp_path / "run")
    assert result.checkpoint is not None, "the checkpoint was committed before the call"


class RecordingListener(Listener):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def begins(self, attempt: int, ranks: int) -> None:
        self.calls.append(("begins", attempt, ranks))

    def printed(self, rank: int, stream: Any, data: bytes) -> None:
        self.calls.append(("printed", rank, stream, data))

    def progressed(self, rank: int, progress: Progress) -> None:
        self.calls.append(("progressed", rank, progress.done, progress.total))

    def reported(self, report: Reported) -> None:
        self.calls.append(("reported", list(report.metrics), report.checkpoint))

    def failed(self, attempt: int, error: Exception) -> None:
        self.calls.append(("failed", attempt, type(error), sorted(error.rank_failures)))  # type: ignore[attr-defined]


def report_and_fail() -> None:
    runtime.progress(1, 3)
    print("hello", flush=True)
    train.report({"loss": 1.5})
    raise ValueError("no more")


def test_listeners_receive_the_events_of_a_run_without_a_trainer(tmp_path: Path) -> None:
    listener = RecordingListener()
    distributor = TorchDistributor(
        1,
        use_gpu=False,
        storage_path=tmp_path,
        listeners=[listener],
        show_output="none",
        timeout=60,
    )
    with pytest.raises(ValueError, match="no more"):
        distributor.run(report_and_fail)
    calls = [call for call in listener.calls if call[0] != "printed"]
    assert calls == [
        ("begins", 0, 1),
        ("progressed", 0, 1, 3),
        ("reported", [{"loss": 1.5}], None),
        ("failed", 0, ValueError, [0]),
    ]
    printed = b"".join(call[3] for call in listener.calls if call[:3] == ("printed", 0, "stdout"))
    assert printed == b"hello\n"


class Stuck(Listener):
    """Never returns from its first call, in terms of a test."""

    def __init__(self) -> None:
        self.resume = threading.Event()

    def begins(self, attempt: int, ranks: int) -> None:
        self.resume.wait(120)


def sleep() -> None:
    threading.Event().wait()


def test_a_listener_that_never_returns_does_not_stop_a_deadline(
    monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(listeners, "PATIENCE", 1.0)
    stuck = Stuck()
    with pytest.raises(RunTimeout):
        TorchDistributor(1, use_gpu=False, listeners=stuck, timeout=1).run(sleep)
    [warning] = [each for each in warned() if "has not returned for 1 s" in each]
    assert "leaves out 1 further call" in warning, "that of `failed`"
    assert "self.resume.wait(120)" in warning, "where it is"
    stuck.resume.set()


def test_a_run_with_a_listener_that_never_returns_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listeners, "SHORT_PATIENCE", 0.5)
    stuck = Stuck()
    future = TorchDistributor(1, use_gpu=False, listeners=stuck, timeout=120).submit(sleep)
    assert future.cancel()
    stuck.resume.set()


class Slow(RecordingListener):
    def progressed(self, rank: int, progress: Progress) -> None:
        time.sleep(0.1)
        super().progressed(rank, progress)


def report_after_much_progress() -> None:
    for step in range(100):
        runtime.progress(step)
    train.report({"loss": 1.5})


@pytest.mark.parametrize(
    ("name", "value"), [("MAX_WAITING", 10 * listeners.OVERHEAD), ("PATIENCE", 0.5)]
)
def test_what_a_slow_listener_does_not_receive_is_telemetry(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warned: Callable[[], list[str]],
    name: str,
    value: float,
) -> None:
    """While too much waits for it, and once the run has ended."""
    monkeypatch.setattr(listeners, name, value)
    monkeypatch.setattr(listeners, "SOON", 0.0)
    slow = Slow()
    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path, listeners=slow, timeout=60)
    ranks.run(report_after_much_progress)
    _, *progressed, reported = [call for call in slow.calls if call[0] != "printed"]
    assert progressed == [("progressed", 0, step, None) for step in range(len(progressed))]
    assert len(progressed) < 50
    assert reported == ("reported", [{"loss": 1.5}], None)
    [warning] = [each for each in warned() if "slower than the ranks" in each]
    assert "It receives all reports" in warning
