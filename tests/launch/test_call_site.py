"""Spark's UI names the user's line that started a run, not this package's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from conftest import facts_in, needs_java

from distributor.launch.call_site import CallSite

RunDriver = Callable[..., "subprocess.CompletedProcess[str]"]

SESSION = """
import json, os, sys, urllib.request
from pyspark.sql import SparkSession
from distributor import TorchDistributor

builder = SparkSession.builder.master("local[2]").config("spark.ui.port", "0")
spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
ranks = TorchDistributor(2, local_mode=False, use_gpu=False, warm=False)

def get(what):
    api = f"{spark.sparkContext.uiWebUrl}/api/v1/applications/{spark.sparkContext.applicationId}"
    with urllib.request.urlopen(f"{api}/{what}") as answer:
        return json.load(answer)

def rank():
    return int(os.environ["RANK"])

def start():
    return ranks.run(rank)  # the line of run

start()
ranks.submit(rank).result()  # the line of submit
exec(compile("ranks.run(rank)", "/tmp/ipykernel_1/2.py", "exec"))
spark.range(2).collect()  # the user's own

print("FACTS " + json.dumps({
    "jobs": [job["name"] for job in get("jobs")],
    "descriptions": [job.get("description") for job in get("jobs")],
    "details": [stage["details"] for stage in get("stages")],
    "sql": [execution["description"] for execution in get("sql")],
}))
"""


@pytest.mark.spark
@needs_java
def test_the_ui_names_the_users_line(run_driver: RunDriver) -> None:
    facts = facts_in(run_driver(SESSION))
    lines = SESSION.splitlines()
    (run,) = [n for n, line in enumerate(lines, 1) if line.endswith("# the line of run")]
    (submit,) = [n for n, line in enumerate(lines, 1) if line.endswith("# the line of submit")]
    own, cell, *others = facts["jobs"]
    assert [cell, *others] == ["<cell>:1", f"driver.py:{submit}", f"driver.py:{run}"]
    assert own.startswith("collect at "), "the user's own jobs keep PySpark's name"
    assert facts["descriptions"] == [None, *["rank on 2 ranks"] * 3]
    assert facts["sql"][:3] == ["rank on 2 ranks"] * 3
    assert facts["sql"][3] == own
    first = facts["details"][-1].splitlines()
    assert first[0] == f"start at driver.py:{run}"
    assert first[1].startswith("<module> at driver.py:")


def test_the_call_site_is_the_callers_line_outside_this_package() -> None:
    line = sys._getframe().f_lineno + 1
    found = CallSite.of_caller("train")
    assert found.short == f"test_call_site.py:{line}"
    assert found.long.startswith(f"{sys._getframe().f_code.co_name} at {found.short}\n")


def test_runs_of_the_command_line_have_the_name_of_their_program() -> None:
    namespace: dict[str, Any] = {"__name__": "distributor.cli", "CallSite": CallSite}
    found = eval("CallSite.of_caller('train.py')", namespace)
    assert found == CallSite("train.py", "distributor run train.py")
