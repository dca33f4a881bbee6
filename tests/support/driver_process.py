"""Driver programs that a test starts, signals and kills."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import textwrap
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from support.packages import variables_for
from support.waiting import MARK, marked


@contextmanager
def driver(source: str, folder: Path, *args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a driver; at the end kill it and whatever it has left behind."""
    script, mark = folder / "driver.py", uuid.uuid4().hex
    script.write_text(textwrap.dedent(source))
    process = subprocess.Popen(
        [sys.executable, str(script), *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=variables_for(source, {MARK: mark}),
        text=True,
        cwd=folder,
    )
    too_late = threading.Timer(150, process.kill)
    too_late.start()
    try:
        yield process, mark
    finally:
        too_late.cancel()
        process.kill()
        for left in marked(mark):  # they may hold the pipe
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        process.communicate()


def read_pids(process: subprocess.Popen[str], count: int) -> list[int]:
    """Read the process ids that ranks print, until there are enough."""
    assert process.stdout
    pids: list[int] = []
    for line in process.stdout:
        if found := re.search(r"pid (\d+)", line):
            pids.append(int(found.group(1)))
        if len(pids) == count:
            return pids
    raise AssertionError(f"the driver ended after it had printed {pids}")
