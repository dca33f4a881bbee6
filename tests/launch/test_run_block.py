"""The block of a run below a notebook's cell."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from support.driver_output import Clock, Notebook

from distributor.rank.messages import Progress, Reported
from distributor.screen.messages import notify
from distributor.screen.run_block import INTERVAL, RunBlock
from distributor.screen.run_progress import RunProgress


class Shown:
    """Records what a block shows."""

    def __init__(self) -> None:
        self.pages: list[str] = []
        self.texts: list[str] = []

    def show(self, page: str, text: str) -> None:
        self.pages.append(page)
        self.texts.append(text)


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def block(shown: Shown, clock: Clock) -> RunBlock:
    return RunBlock(lambda: "train<1>", {"run": "2024-1"}, clock, shown)


@contextlib.contextmanager
def in_notebook() -> Iterator[None]:
    stream = Notebook()
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        yield
    assert stream.getvalue() == ""


def test_it_shows_a_run_from_the_wait_to_its_end(
    block: RunBlock, shown: Shown, clock: Clock
) -> None:
    progress = RunProgress(2, clock)
    with in_notebook(), block:
        assert "train&lt;1&gt;</strong>" in shown.pages[-1]
        assert shown.texts[-1] == "train<1>: waiting"
        notify("Waiting: 1 of 2 slots, see https://host:4040/jobs")
        assert '<a href="https://host:4040/jobs">' in shown.pages[-1]
        block.follow(progress)
        progress.start(range(1), "first")
        block.note_output(0, b"epoch 1\nepoch \x1b[1m2\x1b[0m\r 45%|####\n\n")
        clock.now += INTERVAL
        block.tick()
        cells = ["rank 0", "first", "running", "<code> 45%|####</code>", "rank 1", "starting"]
        assert [cell for cell in cells if f">{cell}" not in shown.pages[-1]] == []
        progress.start(range(1, 2), "second")
        progress.update(Progress(1, 4, {"loss": 0.5}, at=1.0))
        block.note_report(Reported([{}, {}], "/mnt/checkpoint_000001"))
        clock.now += 65
        block.tick()
        assert '<progress value="0.2500"></progress> 1/4 [01:05' in shown.pages[-1]
        assert shown.texts[-1].startswith("train<1>:  25%|")
    for text in ("finished", "1 min 6 s", "2 ranks on 2 hosts", "/mnt/checkpoint_000001"):
        assert text in shown.pages[-1]
        assert text in shown.texts[-1]


def test_it_says_how_a_run_ended(block: RunBlock, shown: Shown) -> None:
    with contextlib.suppress(KeyError), in_notebook(), block:
        raise KeyError("step")
    assert "train<1>: failed" in shown.texts[-1]
    assert "error: KeyError: 'step'" in shown.texts[-1]
    assert "finished" not in shown.pages[-1]
