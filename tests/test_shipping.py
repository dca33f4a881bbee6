"""Executors that lack this package run it from the archive that the driver ships."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import facts_in, needs_connect, needs_java

pytestmark = [pytest.mark.spark, needs_java]

ONLY_FROM_ARCHIVES = """
import sys
from importlib.machinery import PathFinder

class OnlyFromArchives:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in ("distributor", "cloudpickle"):
            return None
        archives = [entry for entry in sys.path if entry.endswith(".zip")]
        found = PathFinder.find_spec(name, archives)
        if found is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found

sys.meta_path.insert(0, OnlyFromArchives)
"""
"""Makes an interpreter blind to an installed package, however it was installed."""


@pytest.mark.parametrize(
    "session",
    [
        'master("local-cluster[2,1,1024]").config("spark.ui.enabled", "false")',
        pytest.param('remote("local[2]")', marks=needs_connect),
    ],
    ids=["classic", "connect"],
)
def test_executors_need_no_package(
    session: str,
    python_that_begins_with: Callable[[str], Path],
    run_driver: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_driver(
        f"""
import json, os
from pyspark.sql import SparkSession

spark = SparkSession.builder.{session}.getOrCreate()

def try_to_import(batches):
    import importlib
    import pyarrow
    found = []
    for name in ("distributor", "cloudpickle"):
        try:
            found.append(importlib.import_module(name).__file__)
        except ModuleNotFoundError:
            found.append("missing")
    for _ in batches:
        yield pyarrow.RecordBatch.from_pydict(dict(found=found))

rows = spark.range(0, 1, 1, 1).mapInArrow(try_to_import, "found string").collect()

from distributor import TorchDistributor

class Broken(Exception):
    pass

def tell_where():
    import cloudpickle, distributor
    print("in", os.environ["RANK"])
    return distributor.__file__, cloudpickle.__file__

def fail():
    raise Broken("no")

distributor = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=60)
first, second = distributor.run_all(tell_where), distributor.run_all(tell_where)
try:
    distributor.run(fail)
except Broken as error:
    broken = list(error.args)
print("FACTS " + json.dumps(dict(
    without=[row.found for row in rows], first=first, second=second, broken=broken
)))
spark.stop()
""",
        env={"PYSPARK_PYTHON": str(python_that_begins_with(ONLY_FROM_ARCHIVES))},
    )
    facts = facts_in(done)
    assert facts["without"] == ["missing", "missing"], "the executors are not bare"
    for of_rank in [*facts["first"], *facts["second"]]:
        assert len(of_rank) == 2
        assert all(".zip" in file for file in of_rank), of_rank
    assert facts["broken"] == ["no"]
    shown = done.stdout.splitlines()
    assert [shown.count(f"[{rank}] in {rank}") for rank in range(2)] == [2, 2]
