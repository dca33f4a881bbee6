"""The command ``distributor doctor`` in a process of its own, and its checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

SECONDS = 200.0
EXAMINE = """
def examine(**settings):
    import distributor
    report = distributor.doctor(**{"num_processes": 2, "local_mode": False, **settings})
    send(report=json.loads(report.to_json()))
"""
"""Defines the examination in a driver program."""


class Found(NamedTuple):
    """The checks of one report, and the command's exit code."""

    checks: list[dict[str, str]]
    exit_code: int = 0

    def having(self, status: str) -> dict[str, dict[str, str]]:
        """Return the checks of a status, by name."""
        return {check["name"]: check for check in self.checks if check["status"] == status}

    @property
    def text(self) -> str:
        """What is wrong, for the message of a failed test."""
        wrong = [check for check in self.checks if check["status"] not in ("ok", "not checked")]
        return json.dumps(wrong, indent=1)


def doctor(
    *arguments: str, env: Mapping[str, str] | None = None, inside: Sequence[str] = ()
) -> Found:
    """Run the command, if wanted inside another one, and return what it found."""
    done = subprocess.run(
        [*inside, sys.executable, "-m", "distributor", "doctor", "--json", *arguments],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return Found(json.loads(done.stdout)["checks"], done.returncode)
