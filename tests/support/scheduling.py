"""Which tests share a process when pytest-xdist distributes them, and which come first.

Starting Spark costs 20 CPU seconds, so the tests of the shared session are in two groups, of one
process each. A file's other tests are a group, too, for the sake of its fixtures. Tests that run a
driver program of their own are distributed one by one.
"""

from __future__ import annotations

from typing import Any

import pytest

ONE_PROCESS = ("test_connect.py",)
"""Files whose tests use a fixed port."""
LONGEST = (
    "test_gpus.py",
    "test_zygote.py",
    "test_job_run.py",
    "test_server_failures.py",
    "test_without_server.py",
    "test_connect.py",
    "test_notebooks.py",
    "test_chaos.py",
    "test_preemption.py",
    "test_memory.py",
)
"""Files that start right after the groups of the shared session, the longest first."""


def distribute_tests(items: list[Any]) -> None:
    """Give each test its group, and order the groups by the time that they take."""
    for item in items:
        if group := _group_of(item):
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=_place)


def _group_of(item: Any) -> str:
    if _shares_spark(item):
        return "spark-files" if item.path.parent.name == "tests" else "spark-folders"
    definitions = item._fixtureinfo.name2fixturedefs.values()
    shares_fixtures = any(each[-1].scope == "module" for each in definitions)
    if "run_driver" in item.fixturenames and not shares_fixtures:
        return "" if item.path.name not in ONE_PROCESS else item.path.name
    return str(item.path.name)


def _shares_spark(item: Any) -> bool:
    if "spark" in item.fixturenames:
        return True
    callspec = getattr(item, "callspec", None)
    uses_launchers = callspec is not None and "cluster" in callspec.params.values()
    return uses_launchers and item.get_closest_marker("spark") is not None


def _place(item: Any) -> int:
    if _shares_spark(item):
        return 0
    name = item.path.name
    return 1 + (LONGEST.index(name) if name in LONGEST else len(LONGEST))
