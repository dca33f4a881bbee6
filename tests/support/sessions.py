"""Runs `session_program` in a process of its own, and reads what its scenarios report."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.packages import ONLY_FROM_ARCHIVES, environment, packed, python_that_begins
from support.waiting import DEADLINE, until

PROGRAM = Path(__file__).with_name("session_program.py")
SECRET = {"SPARK_CONNECT_AUTHENTICATE_TOKEN": "of these tests"}


@dataclass
class SessionProgram:
    """A driver program that runs scenarios; its output and their files are in the folder."""

    process: subprocess.Popen[str]
    folder: Path

    def facts(self, scenario: str) -> dict[str, Any]:
        """Run a scenario, wait until it has ended, and return what it reports."""
        assert self.process.stdin
        print(scenario, file=self.process.stdin, flush=True)
        end = f"\nEND {scenario} "
        self._wait_for(end)
        report, _ = self._printed("stdout").partition(end)[2].split("\n", 1)
        facts: dict[str, Any] = json.loads(report)
        assert "traceback" not in facts, facts["traceback"]
        return facts

    def output(self, scenario: str, stream: str = "stdout") -> str:
        """Return what a scenario, and its ranks, printed; it has ended."""
        _, _, begun = self._printed(stream).partition(f"BEGIN {scenario}\n")
        return begun.partition(f"\nEND {scenario}")[0]

    def wait_until_it_serves(self) -> None:
        """Wait until it has its session."""
        self._wait_for("\nREADY")

    def _wait_for(self, text: str) -> None:
        """Wait until the program has printed a text, to the end of its line, or has ended."""

        def has_printed() -> bool:
            return "\n" in self._printed("stdout").partition(text)[2]

        until(lambda: has_printed() or self.process.poll() is not None, text, DEADLINE)
        assert has_printed(), self._printed("stderr")[-8000:]

    def _printed(self, stream: str) -> str:
        return "\n" + (self.folder / stream).read_text()


@contextlib.contextmanager
def session_program(folder: Path) -> Iterator[SessionProgram]:
    """Start the program, whose executors do not have this package; all is written to a folder."""
    packed(environment(folder / "bare", "1.0", bare=True), folder / "bare.tar.gz")
    place = folder / "bin"
    place.mkdir()
    shutil.copy(
        python_that_begins(folder / "before_all_else", ONLY_FROM_ARCHIVES), place / "python3"
    )
    variables = {
        **os.environ,
        **SECRET,
        "DISTRIBUTOR_CACHE": str(folder / "cache"),
        "PATH": os.pathsep.join([str(place), os.environ["PATH"]]),
    }
    variables.pop("PYSPARK_PYTHON", None)  # a Connect server then runs python3
    command = [sys.executable, str(PROGRAM), str(folder)]
    with open(folder / "stdout", "w") as out, open(folder / "stderr", "w") as err:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=err, text=True, env=variables
        )
    with process:
        try:
            yield SessionProgram(process, folder)
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                assert process.stdin
                process.stdin.close()
                process.wait(timeout=60)
            process.kill()
