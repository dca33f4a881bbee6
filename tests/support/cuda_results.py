"""A pytest plugin that records what ran on a GPU; see `make test-gpu`."""

from __future__ import annotations

import pytest

from benchmarks.gpu_results import record
from support.cuda import NO_GPU

_outcomes: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        _outcomes[report.nodeid] = f"{report.outcome} {reason}".strip()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _outcomes and not NO_GPU:
        record("tests", dict(sorted(_outcomes.items())))
