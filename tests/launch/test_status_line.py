"""The status line of runs, and the screen that all runs and messages share."""

from __future__ import annotations

import io

import pytest
from support.driver_output import DriverOutput, Notebook, Terminal, on_screen

from distributor.screen.messages import RunLabel


@pytest.fixture
def driver() -> DriverOutput:
    return DriverOutput()


def test_the_status_line_stays_below_the_output(driver: DriverOutput) -> None:
    screen = driver.screen(Terminal)
    driver.status = "train on 2 ranks, 00:01"
    driver.tick()
    assert screen.getvalue() == "", "a short run has no status line"
    driver.tick(after=2.0)
    assert on_screen(screen.getvalue()) == ["train on 2 ranks, 00:01"]
    driver.status = "train on 2 ranks, 00:03"
    driver.tick(after=2.0)
    driver.write((0, "stdout", b"a line\n"))
    assert on_screen(screen.getvalue()) == ["[0] a line", "train on 2 ranks, 00:03"]
    driver.close()
    assert on_screen(screen.getvalue()) == ["[0] a line", ""]


def test_a_ranks_progress_bar_replaces_the_status_line(driver: DriverOutput) -> None:
    screen = driver.screen(Terminal)
    driver.status = "train on 2 ranks, 00:01"
    driver.tick(after=2.0)
    driver.bar("50%")
    assert on_screen(screen.getvalue()) == ["[0] 50%"]
    driver.write((0, "stderr", b"\n"))
    driver.tick(after=1.0)
    assert on_screen(screen.getvalue()) == ["[0] 50%", "train on 2 ranks, 00:01"]


def test_a_file_gets_the_status_from_time_to_time_once_there_is_progress(
    driver: DriverOutput,
) -> None:
    driver.status = "nothing is reported"
    driver.tick(after=100.0)
    assert driver.err() == ""
    driver.has_progress, driver.status = True, "train: 50%"
    driver.tick()
    driver.tick(after=29.0)
    driver.status = "train: 75%"
    driver.tick(after=2.0)
    driver.status = "train: 100%"
    driver.close()
    assert driver.err() == "train: 50%\ntrain: 75%\ntrain: 100%\n"


@pytest.mark.parametrize("kind", [Terminal, Notebook])
def test_a_line_in_two_parts_stays_one(driver: DriverOutput, kind: type[io.StringIO]) -> None:
    screen = driver.screen(kind)
    driver.write((0, "stdout", b"validating... "))
    driver.tick(after=1.5)
    assert screen.getvalue().endswith("[0] validating... ")
    driver.write((0, "stdout", b"still... "))
    driver.tick(after=1.5)
    driver.write((0, "stdout", b"done\nnext\n"))
    driver.tick()
    assert screen.getvalue().splitlines() == ["[0] validating... still... done", "[0] next"]


def test_runs_have_labels_while_several_are_active() -> None:
    with RunLabel("train") as first:
        assert first.prefix(3, 4) == "[3] "
        with RunLabel("train") as second, RunLabel("score") as third:
            prefixes = [label.prefix(3, 4) for label in (first, second, third)]
            assert prefixes == ["[train 3] ", "[train#2 3] ", "[score 3] "]
    with RunLabel("train") as alone:
        assert alone.prefix(0, 4) == "[0] "
        assert [alone.prefix(rank, 11) for rank in (3, 10)] == ["[3]  ", "[10] "]
