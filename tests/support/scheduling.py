"""Which tests run in the same process when pytest-xdist distributes them, and which start first.

Starting Spark costs 15 CPU seconds, so the tests of the shared session run in one process. So do
the tests of MLflow: they share a server, and a zygote that has imported MLflow. The other tests of
a file run in one process, which sets up their fixtures once. Tests that start a driver program, and
share nothing else, are distributed one by one.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[2]
USES_SPARK = re.compile(r"\bspark: Any|\bdistribute: |getfixturevalue\(\"spark\"\)")
SHARES_FIXTURES = re.compile(r'scope="module"|usefixtures\("modules_folder"')
STARTS_DRIVERS = re.compile(r"\brun_(gpu_)?driver\b")
ONE_PROCESS = ("test_connect.py",)
"""Files whose tests use a fixed port."""
LONGEST = (
    "test_connect.py",
    "test_gpu_assignment.py",
    "test_cli.py",
    "test_environments.py",
    "test_modules.py",
    "test_source.py",
    "test_endings.py",
    "test_kills.py",
    "test_resuming.py",
)
"""Files that start right after the groups of the shared session and of MLflow."""


class Scheduler(LoadScopeScheduling):  # type: ignore[misc]
    """Distribute groups of tests; a process receives the next group when it has finished one."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """Return the name of the group of a test."""
    path, _, test = nodeid.partition("::")
    if _shares_spark(nodeid):
        return "spark"
    text = _text_of(path)
    if "/tracking/" in path:
        return "mlflow"
    if Path(path).name in ONE_PROCESS or SHARES_FIXTURES.search(text):
        return path
    name, _, _ = test.partition("[")
    body = text.partition(f"def {name}(")[2].partition("\ndef ")[0]
    return nodeid if STARTS_DRIVERS.search(body) else path


def place_of(nodeid: str) -> int:
    """Return the place of a test in the order of all tests: long groups start first."""
    if _shares_spark(nodeid):
        return 0
    if group_of(nodeid) == "mlflow":
        return 1
    name = Path(nodeid.partition("::")[0]).name
    return 2 + (LONGEST.index(name) if name in LONGEST else len(LONGEST))


def _shares_spark(nodeid: str) -> bool:
    path, _, test = nodeid.partition("::")
    if not USES_SPARK.search(_text_of(path)):
        return False
    name, _, parameters = test.partition("[")
    return bool(re.search(r"\bcluster\b", parameters)) or _asks_for_spark(path, name)


def _asks_for_spark(path: str, name: str) -> bool:
    signature = _text_of(path).partition(f"def {name}(")[2].partition(") -> ")[0]
    return bool(re.search(r"\b(spark|context|conf|encrypted): ", signature))


@functools.cache
def _text_of(path: str) -> str:
    return (ROOT / path).read_text()
