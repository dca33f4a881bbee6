"""Local runs: a node on a thread of the driver, however the driver ends it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import cloudpickle
import pytest
from support.waiting import assert_gone

from distributor import Listener, TorchDistributor
from distributor.wire.node_link import MAX_BACKLOG, QueueLinks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def ranks(**settings: object) -> TorchDistributor:
    return TorchDistributor(2, use_gpu=False, timeout=100, **settings)  # type: ignore[arg-type]


def test_output_is_complete_if_the_driver_is_slower_than_the_ranks(tmp_path: Path) -> None:
    size = MAX_BACKLOG * 3 // 2

    class Slow(Listener):
        def printed(self, rank: int, stream: object, data: bytes) -> None:
            time.sleep(0.01)

    def talk() -> None:
        if os.environ["RANK"] == "0":
            os.write(1, b"x" * 99 + b"\n")
            os.write(1, b"y" * (size - 100))

    ranks(log_dir=tmp_path, listeners=[Slow()], show_output="none").run(talk)
    [log] = tmp_path.glob("*/attempt_0/rank0.stdout")
    assert log.stat().st_size == size


def test_a_run_that_is_cancelled_at_once_ends_at_once() -> None:
    began = time.monotonic()
    for _ in range(3):
        assert ranks().submit(time.sleep, 60).cancel()
    assert time.monotonic() < began + 20


def test_an_interrupt_that_does_not_reach_the_node_ends_its_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Interrupting(Listener):
        def printed(self, rank: int, stream: object, data: bytes) -> None:
            monkeypatch.setattr(QueueLinks, "broadcast", lambda links, message: None)
            raise KeyboardInterrupt

    def talk() -> None:
        (tmp_path / str(os.getpid())).touch()
        print("ready", flush=True)
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        ranks(listeners=[Interrupting()]).run(talk)
    assert_gone([int(path.name) for path in tmp_path.iterdir()])
