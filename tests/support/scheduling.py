"""Which tests run in the same process when pytest-xdist distributes them, and which start first.

What a test uses decides, which the processes know that collect the tests: each sorts them, and one
writes their groups to a file for the scheduler. (The mark ``xdist_group`` alone has no effect:
pytest-xdist 3.8 appends the group to an attribute that pytest 9.2 does not have.)

- Starting Spark costs 15 CPU seconds, so the tests of the shared session are two groups. Most of
  their time is waiting, so one group would be the longest path of all.
- The tests of MLflow share a server, and a zygote that has imported MLflow.
- The other tests of a file are a group, which sets up their fixtures and warm process once;
  but tests that start a driver program, and share nothing else, are distributed one by one.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

SECOND_SESSION = ("compat", "data", "diagnosis", "launch", "tracking")
"""Folders whose tests of the shared session are the second group; it takes as long as the first."""
DRIVERS = {"run_driver", "run_gpu_driver"}


class Scheduler(LoadScopeScheduling):  # type: ignore[misc]
    """Distribute groups of tests; a process receives the next group when it has finished one."""

    def __init__(self, config: pytest.Config, log: Any, groups: Path) -> None:
        super().__init__(config, log)
        self._file = groups

    @functools.cached_property
    def _groups(self) -> dict[str, str]:
        groups: dict[str, str] = json.loads(self._file.read_text())
        return groups

    def _split_scope(self, nodeid: str) -> str:
        return self._groups[nodeid]

    def _reschedule(self, node: Any) -> None:
        # One test ahead is enough. The original sends two, which wait if the current one is long.
        if not self.workqueue or self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)


def arrange(items: list[pytest.Item]) -> dict[str, str]:
    """Sort tests, so that groups that take long start first, and return the group of each."""
    groups = {item: _group_of(item) for item in items}
    items.sort(key=lambda item: _place_of(item, groups[item]))  # the order of a file stays
    return {item.nodeid: group for item, group in groups.items()}


def _group_of(item: pytest.Item) -> str:
    folder = item.path.parent.name
    if mark := item.get_closest_marker("xdist_group"):
        return str(mark.args[0])
    if _shares_spark(item):
        return f"spark-{1 + (folder in SECOND_SESSION)}"
    if folder == "tracking":
        return "mlflow"
    if _starts_driver(item) and not _shares_fixtures(item):
        return item.nodeid
    return item.location[0]


def _place_of(item: pytest.Item, group: str) -> int:
    if _shares_spark(item):
        return 0
    if group == "mlflow" or item.get_closest_marker("xdist_group"):
        return 1
    if item.get_closest_marker("spark"):
        return 2
    return 3 if group == item.nodeid or _shares_fixtures(item) else 4


def _shares_spark(item: pytest.Item) -> bool:
    """Return True for tests of the shared session, which some parameters ask for at run time."""
    mark = item.get_closest_marker("spark")
    by_parameter = mark and ("distribute" in _fixtures(item) or mark.kwargs.get("shared"))
    return "spark" in _fixtures(item) or bool(by_parameter)


def _starts_driver(item: pytest.Item) -> bool:
    return not DRIVERS.isdisjoint(_fixtures(item))


def _shares_fixtures(item: pytest.Item) -> bool:
    return any(definition.scope == "module" for definition in _fixtures(item).values())


def _fixtures(item: pytest.Item) -> dict[str, pytest.FixtureDef[object]]:
    found = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    return {name: definitions[-1] for name, definitions in found.items()}
