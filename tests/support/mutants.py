"""``make mutants``: put mistakes into a copy of the package, one at a time; tests must notice each.

Without arguments it takes all mutants of `mutant_table`, otherwise those whose promise or path
contains one of the arguments. First the tests must pass on an unchanged copy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from support.mutant_table import MUTANTS, Mutant
from support.waiting import marked

ROOT = Path(__file__).parents[2]
COPIED = ("distributor", "tests", "conf", "setup.cfg")
MARK = "DISTRIBUTOR_MUTANT"
"""An environment variable of all processes that a test run starts."""
SECONDS = 300.0
"""Seconds for the tests of a mutant, which take a few, or a minute on a busy machine."""
FAILED = 1
"""The exit code of pytest if tests failed; others mean that it could not run them."""


class TestRun(NamedTuple):
    """How a run of some tests ended: the exit code (None if it was killed), and what it printed."""

    code: int | None
    output: str
    seconds: float

    def failed(self, test: str) -> bool:
        """Return whether a test failed, with any of its parameters."""
        lines = self.output.splitlines()
        names = [line.partition(" ")[2] for line in lines if line.startswith(("FAILED", "ERROR"))]
        return any(f"{name} ".startswith((f"tests/{test} ", f"tests/{test}[")) for name in names)


def mutated(text: str, mutant: Mutant) -> str:
    """Return the text of a file with the mistake in it."""
    found = text.count(mutant.old)
    if found != 1:
        raise ValueError(f"{mutant.path} contains {mutant.old!r} {found} times")
    return text.replace(mutant.old, mutant.new)


def outcome_of(mutant: Mutant, root: Path = ROOT, seconds: float = SECONDS) -> tuple[str, TestRun]:
    """Return whether a mutant's test fails: "noticed", "NOT NOTICED", or what went wrong."""
    with copied(root) as copy:
        file = copy / mutant.path
        file.write_text(mutated(file.read_text(), mutant))
        run = run_tests(copy, [mutant.test], seconds)
    if run.code is None:
        return "HUNG", run  # a test that hangs says nothing
    if run.code not in (0, FAILED):
        return "NOT RUN", run
    return "noticed" if run.failed(mutant.test) else "NOT NOTICED", run


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """Copy the package and its tests into a new folder, which is removed with all that uses it."""
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder, "copy")
        copy.mkdir()
        for name in COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, copy / name, symlinks=True)
            elif (root / name).exists():
                shutil.copy2(root / name, copy / name)
        yield copy


def run_tests(copy: Path, tests: Sequence[str], seconds: float) -> TestRun:
    """Run tests of a copy, and end all processes that are left."""
    began, mark = time.monotonic(), uuid.uuid4().hex
    temporary = copy.with_name("tmp")
    temporary.mkdir()
    command = [sys.executable, "-m", "pytest", "-q", "-rfEs", "--tb=short", "-m", "not slow"]
    with copy.with_name("output").open("w+", errors="replace") as output:
        process = subprocess.Popen(
            [*command, *(f"tests/{test}" for test in tests)],
            cwd=copy,
            # Ranks and executors find the copy in this way, before the package that is installed.
            env={**os.environ, "PYTHONPATH": str(copy), "TMPDIR": str(temporary), MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,  # no pipe, which processes that are left would keep open
            stderr=subprocess.STDOUT,
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        finally:
            for left in marked(mark, MARK):
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()
        output.seek(0)
        return TestRun(code, output.read(), time.monotonic() - began)


def main(patterns: Sequence[str]) -> int:
    """Print a row for each mutant, and return 1 if one was not noticed."""
    mutants = [
        mutant
        for mutant in MUTANTS
        if not patterns or any(pattern in f"{mutant.promise} {mutant.path}" for pattern in patterns)
    ]
    tests = sorted({mutant.test for mutant in mutants})
    with copied(ROOT) as copy:
        sound = run_tests(copy, tests, SECONDS + 30 * len(tests))
    if sound.code != 0 or "\nSKIPPED" in sound.output:
        print(sound.output[-8000:] + "\nWithout any mutant, all of these tests must pass.")
        return 1
    print(f"{sound.seconds:6.1f} s  sound        {len(tests)} tests pass without any mutant")
    began, wrong = time.monotonic(), 0
    for mutant in mutants:
        outcome, run = outcome_of(mutant)
        wrong += outcome != "noticed"
        print(f"{run.seconds:6.1f} s  {outcome:11}  {mutant.promise}  ({mutant.path})", flush=True)
        if outcome in ("HUNG", "NOT RUN"):
            print(run.output[-4000:])
    seconds = time.monotonic() - began
    print(f"{seconds:6.1f} s  {len(mutants) - wrong} of {len(mutants)} mutants were noticed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
