"""The command line on a terminal, wide and narrow."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import needs_java
from support.driver_output import on_screen

pexpect = pytest.importorskip("pexpect")
DEADLINE = 120
WIDTHS = pytest.mark.parametrize("width", [80, 40])
PROGRAM = """
import os, sys, time
import torch.distributed as dist
from distributor import runtime

dist.init_process_group("gloo")
for step in range(1, 31):
    runtime.progress(step, 30, loss=1 / step)
    time.sleep(0.1)
print("trained for 30 steps, which is a line that needs more than forty columns")
dist.barrier()
if "hang" in sys.argv:
    time.sleep(600)
"""


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that starts the command line on a terminal of some width."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    (tmp_path / "train.py").write_text(PROGRAM)

    def start(width: int, *args: str) -> Any:
        return pexpect.spawn(
            sys.executable,
            ["-m", "distributor", *args],
            cwd=str(tmp_path),
            # Without the width that readline has set, which os.environ does not have.
            env={**os.environ, "PYSPARK_PYTHON": sys.executable},
            dimensions=(24, width),
            timeout=DEADLINE,
            encoding="utf-8",
        )

    return start


def seen(session: Any) -> str:
    """Return what a session has printed from here to its end."""
    session.expect(pexpect.EOF)
    session.close()
    return str(session.before)


def without_colors(text: str) -> str:
    return re.sub(r"\x1b\[\d*m", "", text)


@WIDTHS
def test_the_help_fits(terminal: Callable[..., Any], width: int) -> None:
    text, examples, _ = seen(terminal(width, "run", "--help")).partition("examples:")
    assert "usage: distributor run" in text
    assert examples, "their commands are whole lines, which can be copied"
    too_long = [line for line in text.splitlines() if len(line) > width]
    assert [line for line in too_long if not line.startswith("  --")] == []


@WIDTHS
def test_a_run(terminal: Callable[..., Any], width: int) -> None:
    session = terminal(width, "run", "--nproc", "2", "--cpu", "train.py")
    printed = seen(session)
    assert session.exitstatus == 0
    assert "\x1b[36m[0] " in printed, "the first rank's prefix has a color"
    assert re.search(r"train.py: +\d+%\|", printed), "the progress moves"
    lines = on_screen(without_colors(printed).replace("\r\n", "\n"), 1000)
    assert re.fullmatch(r"Run \S+ of train.py", lines[0])
    ranks = [line for line in lines if line.startswith("[")]
    assert sorted(ranks) == [f"[{rank}] {PROGRAM.split(chr(34))[3]}" for rank in range(2)]
    started = lines.index("Started local training with 2 processes")
    assert started < min(map(lines.index, ranks))
    assert re.fullmatch(r"train.py: 100%\|█+\| 30/30 .*loss=0.03333\]", lines[-3])
    assert re.fullmatch(r"Finished local training with 2 processes in [\d.]+ s", lines[-2])


def test_ctrl_c(terminal: Callable[..., Any]) -> None:
    session = terminal(80, "run", "--nproc", "2", "--cpu", "train.py", "hang")
    for _ in range(2):
        session.expect("trained for 30 steps")
    session.sendintr()
    lines = without_colors(seen(session)).splitlines()
    assert session.exitstatus == 130
    assert lines[-1] == "distributor: interrupted: the run has ended, and no rank is left."
    assert not any("Traceback" in line for line in lines)


@pytest.mark.slow(ci=True)
@pytest.mark.spark
@needs_java
def test_ctrl_c_on_a_cluster(terminal: Callable[..., Any]) -> None:
    """While the run waits for slots or tasks, Ctrl-C mostly interrupts a call of Py4J."""
    options = ("--master", "local-cluster[2,1,1024]", "--nproc", "2", "--cpu")
    session = terminal(80, "run", "--cluster", *options, "train.py", "hang")
    session.expect("Run .* of train.py")
    time.sleep(0.3)
    session.sendintr()
    lines = without_colors(seen(session)).splitlines()
    assert session.exitstatus == 130
    # The terminal's own "^C" precedes it.
    assert lines[-1].endswith("distributor: interrupted: the run has ended, and no rank is left.")
    assert not any("Traceback" in line or "py4j" in line for line in lines), "\n".join(lines)
