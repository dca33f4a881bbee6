"""What an interpreter and a notebook show of the objects of this package."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from distributor import DeepspeedTorchDistributor, TorchDistributor
from distributor.train import Result


def test_a_distributor_shows_its_ranks_and_what_is_not_as_by_default() -> None:
    plain = TorchDistributor(2, use_gpu=False)
    assert repr(plain) == "TorchDistributor(num_processes=2, local_mode=True, use_gpu=False)"
    changed = TorchDistributor((1, 2), use_gpu=False, max_failures=3, env={"TOKEN": "secret"})
    assert repr(changed) == (
        "TorchDistributor(num_processes=(1, 2), local_mode=True, use_gpu=False, max_failures=3)"
    )
    assert "<th" in changed._repr_html_()
    assert "max_failures" in changed._repr_html_()
    assert "secret" not in changed._repr_html_()
    assert repr(DeepspeedTorchDistributor(2, useGpu=False)).startswith("DeepspeedTorchDistributor(")


def wait_for(path: Path) -> None:
    while not path.exists():
        threading.Event().wait(0.01)


def fail() -> None:
    raise KeyError("on purpose")


def test_a_future_shows_the_state_of_its_run(tmp_path: Path) -> None:
    ranks = TorchDistributor(1, use_gpu=False)
    running = ranks.submit(wait_for, tmp_path / "enough")
    assert repr(running) == "<RunFuture of wait_for: running>"
    (tmp_path / "enough").touch()
    running.result()
    assert repr(running) == "<RunFuture of wait_for: finished>"
    assert "finished" in running._repr_html_()

    failed = ranks.submit(fail)
    with pytest.raises(KeyError):
        failed.result()
    assert repr(failed) == "<RunFuture of fail: failed with KeyError>"

    cancelled = ranks.submit(wait_for, tmp_path / "never")
    assert cancelled.cancel()
    assert repr(cancelled) == "<RunFuture of wait_for: cancelled>"


def test_a_result_is_a_table_in_a_notebook() -> None:
    result = Result({"loss": 0.5, "<b>": 1}, None, None, "/runs/mnist", return_value=[1, 2])
    assert repr(result).startswith("Result(metrics={'loss': 0.5, '<b>': 1}, checkpoint=None")
    text = result._repr_html_()
    for shown in ("loss", "0.5", "&lt;b&gt;", "/runs/mnist", "[1, 2]"):
        assert f">{shown}<" in text
    assert "<b>" not in text
