"""Spark's UI names the user's line that started a run, not this package's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until

from distributor import TorchDistributor
from distributor._compat.pyspark import java_context

PROGRAM = """
def start():
    return ranks.run(rank)  # the line of run

start()
ranks.submit(rank).result()  # the line of submit
exec(compile("ranks.run(rank)", "/tmp/ipykernel_1/2.py", "exec"))
spark.range(2).collect()  # the user's own
"""


def rank() -> int:
    return int(os.environ["RANK"])


@pytest.mark.spark
def test_the_ui_names_the_users_line(spark: Any, tmp_path: Path) -> None:
    jobs, executions = shown_jobs(spark), shown_executions(spark)
    ranks = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=120)

    driver = tmp_path / "driver.py"
    driver.write_text(PROGRAM)
    names = {"__name__": "__main__", "spark": spark, "ranks": ranks, "rank": rank}
    exec(compile(PROGRAM, str(driver), "exec"), names)

    until(lambda: len(shown_jobs(spark)) == len(jobs) + 4, "Spark has recorded the four jobs")
    of_run, of_submit, of_cell, own = shown_jobs(spark)[len(jobs) :]
    lines = PROGRAM.splitlines()
    (run,) = [n for n, line in enumerate(lines, 1) if line.endswith("# the line of run")]
    (submit,) = [n for n, line in enumerate(lines, 1) if line.endswith("# the line of submit")]
    title = "rank on 2 ranks"
    assert of_run == (f"driver.py:{run}", title)
    assert of_submit == (f"driver.py:{submit}", title)
    assert of_cell == ("<cell>:1", title)
    assert own[0].startswith("collect at "), "the user's own jobs keep PySpark's name"
    assert own[1] is None
    assert shown_executions(spark)[len(executions) :] == [*[title] * 3, own[0]]


def shown_jobs(spark: Any) -> list[tuple[str, str | None]]:
    """Return the name and the description of each job in the UI's store, the oldest first."""
    found = items_in(java_context(spark.sparkContext).statusStore().jobsList(None))
    jobs = sorted(found, key=lambda job: job.jobId())
    return [(job.name(), value_in(job.description())) for job in jobs]


def items_in(sequence: Any) -> list[Any]:
    return [sequence.apply(i) for i in range(sequence.size())]


def value_in(option: Any) -> str | None:
    return option.get() if option.isDefined() else None


def shown_executions(spark: Any) -> list[str]:
    """Return the description of each SQL query in the UI's store, the oldest first."""
    found = items_in(spark._jsparkSession.sharedState().statusStore().executionsList())
    return [query.description() for query in sorted(found, key=lambda q: q.executionId())]
