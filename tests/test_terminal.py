"""The command line on a terminal."""

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
from support.waiting import DEADLINE

pexpect = pytest.importorskip("pexpect")
PROGRAM = "import time; time.sleep(600)"


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
