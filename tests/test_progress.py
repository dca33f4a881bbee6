"""The progress that ranks report: the live line, over the link and through Spark."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest
import torch
from support.ranks import Distribute

from distributor import TorchDistributor, runtime
from distributor.launchers.spark.hub_address import HubAddress
from distributor.rank.messages import Progress, Reader, line_of
from distributor.screen.run_block import RunProgress

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def count_to(total: int) -> str:
    for step in range(1, total + 1):
        runtime.progress(step, total, loss=1 / step, rank=runtime.get_global_rank())
    return "counted"


def test_the_live_line_shows_rank_0(
    distribute: Distribute, capsys: pytest.CaptureFixture[str]
) -> None:
    assert distribute(2).run(count_to, 4) == "counted"

    # The last line: if executors take half a minute to start, there is another one before it.
    *_, line = (line for line in capsys.readouterr().err.splitlines() if "count_to:" in line)
    assert line.startswith("count_to: 100%|")
    assert "| 4/4 [" in line
    assert line.endswith("2 ranks, loss=0.25, rank=0]")


@pytest.mark.slow
@pytest.mark.spark
def test_without_a_link_progress_arrives_at_the_end(
    spark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = HubAddress(bound="127.0.0.1", advertised="127.0.0.2")
    monkeypatch.setattr(
        "distributor.launchers.spark.launcher.choose_hub_address", lambda *_: elsewhere
    )
    ranks = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=120)

    assert ranks.run(count_to, 4) == "counted"
    assert "| 4/4 [" in capsys.readouterr().err


def test_numbers_and_tensors_are_taken_and_other_values_refused() -> None:
    runtime.progress(torch.tensor(1), 2.0, loss=torch.tensor(0.5), bound=float("inf"))
    with pytest.raises(TypeError, match="progress takes numbers, but loss is 'low'"):
        runtime.progress(1, 2, loss="low")
    with pytest.raises(TypeError, match=r"in a loop: for step in range\(40\): ...; progress\("):
        runtime.progress(range(40))


def test_the_reader_joins_parts_of_lines_and_skips_invalid_ones() -> None:
    sent = [Progress(done, 9, {"loss": done / 7}, at=float(done)) for done in range(9)]
    data = b"no JSON\n[1]\n[[], {}]\n" + b"".join(line_of(progress) for progress in sent)
    for size in (1, 7, len(data)):
        reader = Reader()
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        assert [progress for part in parts for progress in reader.take(part)] == sent


@pytest.mark.parametrize(
    ("done", "total", "seconds", "line"),
    [
        (3, 8, 6.0, "t:  38%|███▊      | 3/8 [00:06<00:10,  2.00s/it, 2 ranks]"),
        (9, 8, 2.0, "t: 9it [00:02,  4.50it/s, 2 ranks]"),
        (50, None, 0.5, "t: 50it [00:00, 100.00it/s, 2 ranks]"),
    ],
)
def test_the_line_is_tqdms(done: float, total: float | None, seconds: float, line: str) -> None:
    now = [0.0]
    progress = RunProgress(2, clock=lambda: now[0])
    progress.start([0], "host")
    assert progress.line("t") == "t on 2 ranks, 1 up, 00:00"
    now[0] = 5.0
    progress.start([1], "host")
    now[0] += seconds  # the start is not part of the time
    progress.update(Progress(done, total, at=seconds))
    assert progress.line("t") == line
    tqdm: Any = pytest.importorskip("tqdm").tqdm
    assert line == tqdm.format_meter(done, total, seconds, prefix="t", postfix="2 ranks")
