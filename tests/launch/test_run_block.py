"""The block of a run below a notebook's cell."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from support.driver_output import Clock, Notebook

from distributor.core import html
from distributor.errors import RunCancelled
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


def test_it_is_updated_now_and_then_if_something_has_changed(
    block: RunBlock, shown: Shown, clock: Clock
) -> None:
    with in_notebook(), block:
        block.follow(RunProgress(1, clock))
        before = len(shown.pages)
        for _ in range(100):
            block.note_output(0, b"a line\n")
            block.tick()
        assert len(shown.pages) == before
        clock.now += INTERVAL
        block.tick()
        block.tick()
        assert len(shown.pages) == before + 1


def test_of_many_ranks_those_that_failed_have_a_row(
    block: RunBlock, shown: Shown, clock: Clock
) -> None:
    progress = RunProgress(64, clock)
    with in_notebook(), block:
        block.follow(progress)
        progress.start(range(62), "host")
        progress.end([7], "failed")
        progress.end(range(8), "finished")
        clock.now += INTERVAL
        block.tick()
    page = shown.pages[-2]
    assert "64 ranks: 7 finished, 1 failed, 54 running, 2 starting" in page
    assert page.count("<tr>") == 1
    assert "running" not in shown.pages[-1]


LIGHT, DARK = "white #d32f2f #1b5e20 #1976d2 #757575", "#111111 #f44336 #388e3c #2196f3 #b8b8b8"
"""Of JupyterLab's themes: the background of outputs, and the block's variables upon it."""
VARIABLES = "error-color1", "success-color0", "brand-color1", "content-font-color2"


def luminance(color: str) -> float:
    parts = bytes.fromhex(color.replace("white", "#ffffff")[1:])
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in (part / 255 for part in parts)
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_the_states_have_contrast_in_jupyterlabs_themes(theme: str) -> None:
    background, *colors = theme.split()
    found = dict(zip(VARIABLES, colors, strict=True))
    for color in (html.RED, html.GREEN, html.BLUE, html.GRAY):
        variable = color.removeprefix("var(--jp-").partition(",")[0]
        pair = sorted([luminance(background), luminance(found[variable])])
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, variable


@pytest.mark.parametrize(
    ("error", "state"),
    [(KeyError("step"), "failed"), (RunCancelled(""), "stopped"), (KeyboardInterrupt(), "stopped")],
)
def test_it_says_how_a_run_ended(
    block: RunBlock, shown: Shown, error: BaseException, state: str
) -> None:
    with contextlib.suppress(type(error)), in_notebook(), block:
        raise error
    assert f"train<1>: {state}" in shown.texts[-1]
    assert "finished" not in shown.pages[-1]
    assert ("error: KeyError: 'step'" in shown.texts[-1]) == (state == "failed")


def test_elsewhere_there_is_none(block: RunBlock, shown: Shown) -> None:
    with block:
        block.add_message("a message")
        block.tick()
    assert shown.pages == []
