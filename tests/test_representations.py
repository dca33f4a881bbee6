"""What an interpreter and a notebook show of the objects of this package."""

from __future__ import annotations

import pytest

from distributor import DeepspeedTorchDistributor, TorchDistributor
from distributor.train import Result


def test_a_distributor_shows_its_ranks_and_what_is_not_as_by_default() -> None:
    changed = TorchDistributor((1, 2), use_gpu=False, max_failures=3, env={"TOKEN": "secret"})
    assert repr(changed) == (
        "TorchDistributor(num_processes=(1, 2), local_mode=True, use_gpu=False, max_failures=3)"
    )
    assert "max_failures" in changed._repr_html_()
    assert "secret" not in changed._repr_html_()
    assert repr(DeepspeedTorchDistributor(2, useGpu=False)).startswith("DeepspeedTorchDistributor(")


def test_a_future_shows_the_state_of_its_run() -> None:
    def fail() -> None:
        raise KeyError("on purpose")

    failed = TorchDistributor(1, use_gpu=False).submit(fail)
    with pytest.raises(KeyError):
        failed.result()
    assert repr(failed) == "<RunFuture of fail: failed with KeyError>"
    assert "failed" in failed._repr_html_()


def test_a_result_is_a_table_in_a_notebook() -> None:
    result = Result({"loss": 0.5, "<b>": 1}, None, None, "/runs/mnist", return_value=[1, 2])
    assert repr(result).startswith("Result(metrics={'loss': 0.5, '<b>': 1}, checkpoint=None")
    text = result._repr_html_()
    for shown in ("loss", "0.5", "&lt;b&gt;", "/runs/mnist", "[1, 2]"):
        assert f">{shown}<" in text
