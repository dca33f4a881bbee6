"""Each error of the package is raised for real, and its text is on the troubleshooting page."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from support.error_classes import error_classes
from support.pages import texts_of_error
from support.waiting import until

from distributor import DistributorError, NodeLost, TorchDistributor, ValueTooLarge, train
from distributor.control import outcomes
from distributor.control.cancellation import Cancellation
from distributor.train.storage.files import read_share
from distributor.train.storage.manifest import StoredFile
from distributor.train.torch import TorchTrainer
from distributor.wire import protocol, sealing
from distributor.wire.spark_error_payload import TaskFailed

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ERRORS = error_classes()
HANDLED_INSIDE = {"NodeStopped", "RefusedError", "Resized"}
NEVER_RAISED = {"TrainingFailedError"}
"""It is only a base class."""


def ranks(number: int = 1, **settings: Any) -> TorchDistributor:
    settings = {"local_mode": True, "use_gpu": False, "timeout": 100, **settings}
    return TorchDistributor(number, **settings)


def kill(pid: int, signum: int = signal.SIGKILL) -> None:
    os.kill(pid, signum)
    threading.Event().wait()


def worker_died() -> None:
    ranks().run(lambda: kill(os.getpid()))


def remote_error() -> None:
    def fail() -> None:
        raise ValueError(threading.Lock())

    ranks().run(fail)


def remote_traceback() -> None:
    with pytest.raises(KeyError) as caught:
        ranks().run(lambda: {}["x"])
    raise caught.value.__cause__ or AssertionError("no cause")


def unpicklable_argument() -> None:
    ranks().run(print, threading.Lock())


def unpicklable_value() -> None:
    ranks().run(threading.Lock)


def start_timeout() -> None:
    ranks(start_timeout=0.001, warm=False).run(os.getpid)


def run_timeout() -> None:
    ranks(timeout=0.5).run(time.sleep, 60)


def run_stalled() -> None:
    ranks(stall_warning=None, stall_timeout=1).run(lambda: threading.Event().wait())


def run_cancelled() -> None:
    """Raise what ends a cancelled run, whose future then raises CancelledError."""
    cancellation = Cancellation()
    cancellation.request()
    cancellation.check()


def other_rank_failed(folder: Path) -> None:
    def upload(checkpoint: train.Checkpoint, name: str) -> train.Checkpoint:
        if train.get_context().get_world_rank() == 1:
            raise KeyError(name)
        target = train.get_context().get_storage().build_checkpoint_path_from_name(name)
        shutil.copytree(checkpoint.path, target)
        return train.Checkpoint(target)

    def report() -> None:
        (folder / "model").mkdir(exist_ok=True)
        (folder / "model" / "weights").write_text("1")
        checkpoint = train.Checkpoint.from_directory(folder / "model")
        train.report({}, checkpoint, checkpoint_upload_fn=upload)

    with pytest.raises(KeyError) as caught:
        ranks(2, storage_path=folder / "runs").run(report)
    raise caught.value.rank_failures[0].exception()  # type: ignore[attr-defined]


def ranks_that_report_differently(folder: Path) -> None:
    def report() -> None:
        own = folder / "runs" / "run" / str(train.get_context().get_world_rank())
        own.mkdir(parents=True)
        checkpoint = train.Checkpoint.from_directory(own)
        train.report({}, checkpoint, checkpoint_upload_mode="NO_UPLOAD")

    ranks(2, storage_path=folder / "runs", name="run").run(report)


def wrong_variable() -> None:
    environment = {"DISTRIBUTOR_CACHE_GB": "many"}
    ranks(environment=["einops"], env=environment).run(os.getpid)


def trainer(function: Callable[..., Any], folder: Path | str, **config: Any) -> TorchTrainer:
    return TorchTrainer(
        function,
        scaling_config=train.ScalingConfig(num_workers=1, local_mode=True),
        run_config=train.RunConfig(
            storage_path=folder,
            failure_config=train.FailureConfig(**config),
            settings={"timeout": 100},
        ),
    )


def worker_group_error(folder: Path) -> None:
    trainer(lambda: {}["x"], folder).fit()


def controller_error(folder: Path) -> None:
    late = trainer(os.getpid, folder)
    late.run_config.settings |= {"start_timeout": 0.001, "warm": False}
    late.fit()


def preemption_error(folder: Path) -> None:
    def be_preempted() -> None:
        train.get_preemption_info()
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: train.get_preemption_info() is not None, "the rank is notified", 60)
        kill(os.getpid(), signal.SIGTERM)

    trainer(be_preempted, folder, max_preemption_failures=0).fit()


def invalid_argument() -> None:
    TorchTrainer(print, run_config=train.RunConfig(failure_config=3))  # type: ignore[arg-type]


def unsupported_parameter() -> None:
    train.ScalingConfig(label_selector={"zone": "a"})


def unknown_scheme() -> None:
    trainer(os.getpid, "nowhere://bucket/runs").fit()


def task_failed() -> None:
    with pytest.raises(KeyError) as caught:
        ranks().run(lambda: {}["x"])
    failures = list(caught.value.rank_failures.values())  # type: ignore[attr-defined]
    raise TaskFailed.of(failures, b"s" * 32)


def damaged(folder: Path) -> None:
    (folder / "weights").write_bytes(b"changed")
    read_share(train.Checkpoint(folder), [StoredFile("weights", 7, 1)], rank=0, size=1)


def missing(folder: Path) -> None:
    read_share(train.Checkpoint(folder), [StoredFile("weights", 7, 1)], rank=0, size=1)


def handshake_refused() -> None:
    greeting = protocol.GREETING.pack(protocol.MAGIC, b"n" * 32)
    protocol.admit(b"t" * 32, b"n" * 32, protocol.hello(b"s" * 32, greeting, b"n" * 32, 0))


def run_not_served() -> None:
    greeting = protocol.GREETING.pack(b"x" * len(protocol.MAGIC), b"n" * 32)
    protocol.hello(b"s" * 32, greeting, b"n" * 32, 0)


def another_run() -> None:
    greeting = protocol.GREETING.pack(protocol.MAGIC, b"n" * 32)
    protocol.check_welcome(b"s" * 32, greeting, b"n" * 32, protocol.UNKNOWN_RUN)


def frame_not_authentic() -> None:
    protocol.FrameTags(b"k" * 32).check(b"t" * 16, b"payload")


def frame_too_large() -> None:
    protocol.check_length(protocol.MAX_FRAME + 1)


def not_authentic() -> None:
    sealing.unseal(sealing.seal(b"failure", b"s" * 32), b"t" * 32)


HERE: dict[str, list[Callable[..., None]]] = {
    "DistributorError": [ranks_that_report_differently],
    "WorkerDied": [worker_died],
    "RemoteError": [remote_error],
    "RemoteTraceback": [remote_traceback],
    "UnpicklableError": [unpicklable_argument, unpicklable_value],
    "StartTimeout": [start_timeout],
    "RunTimeout": [run_timeout],
    "RunStalled": [run_stalled],
    "RunCancelled": [run_cancelled],
    "OtherRankFailed": [other_rank_failed],
    "ExecutorNotReady": [wrong_variable],
    "WorkerGroupError": [worker_group_error],
    "ControllerError": [controller_error],
    "PreemptionError": [preemption_error],
    "InvalidArgument": [invalid_argument],
    "UnsupportedParameter": [unsupported_parameter],
    "UnknownScheme": [unknown_scheme],
    "TaskFailed": [task_failed],
    "Damaged": [damaged, missing],
    "HandshakeRefused": [handshake_refused],
    "RunNotServed": [run_not_served, another_run],
    "FrameNotAuthentic": [frame_not_authentic],
    "FrameTooLarge": [frame_too_large],
    "NotAuthentic": [not_authentic],
}
"""What raises each error without a cluster."""


def assert_documented(error: BaseException) -> None:
    texts = texts_of_error(type(error).__name__)
    assert any(text.search(str(error)) for text in texts), str(error)


@pytest.mark.parametrize(
    ("name", "cause"),
    [(name, cause) for name, causes in HERE.items() for cause in causes],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_the_text_of_an_error_is_documented(
    name: str, cause: Callable[..., None], tmp_path: Path
) -> None:
    arguments = [tmp_path] if cause.__code__.co_argcount else []
    with pytest.raises(ERRORS[name]) as caught:
        cause(*arguments)
    assert_documented(caught.value)


def kill_agent() -> None:
    """Kill this rank's agent, the Python worker of its Spark task, whose title names this run."""
    processes = psutil.process_iter(["cmdline"])
    title = "node 0 of kill_agent"
    agent = next(each for each in processes if title in " ".join(each.info["cmdline"] or []))
    kill(agent.pid)


@pytest.mark.spark
def test_the_text_for_a_lost_node_is_documented(spark: Any) -> None:
    with pytest.raises(NodeLost) as caught:
        ranks(local_mode=False).run(kill_agent)
    assert_documented(caught.value)


@pytest.mark.spark
def test_the_text_for_missing_slots_is_documented(spark: Any) -> None:
    with pytest.raises(DistributorError) as caught:
        ranks(9, local_mode=False, start_timeout=1).run(os.getpid)
    assert_documented(caught.value)


@pytest.mark.spark
def test_the_text_for_a_value_without_room_is_documented(
    spark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(outcomes, "free_memory", lambda: 2**20)
    with pytest.raises(ValueTooLarge) as caught:
        ranks(local_mode=False, log_dir=tmp_path).run(bytes, 40 * 2**20)
    assert_documented(caught.value)


def test_every_error_is_raised() -> None:
    elsewhere = {"ApplicationEnded", "NodeLost", "ValueTooLarge"}
    raised = {name for name, causes in HERE.items() if causes} | elsewhere
    assert ERRORS.keys() - raised - HANDLED_INSIDE == NEVER_RAISED
    assert all(texts_of_error(name) for name in ERRORS.keys() - HANDLED_INSIDE)
