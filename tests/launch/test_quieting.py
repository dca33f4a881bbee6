"""A failure is shown once, by its error: it fails no task, so that Spark has nothing to log."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from conftest import facts_in

A_FAILURE = """
import json, os, sys, tempfile, time, warnings
from pyspark.sql import SparkSession

spark = (
    SparkSession.builder.master("local[3]").config("spark.ui.enabled", "false").getOrCreate()
)
# PySpark's warning about pandas belongs to the user's own import.
from distributor import TorchDistributor

folder = tempfile.mkdtemp()
def fail():
    time.sleep(1.5)  # until Spark shows its progress bar
    while os.path.exists(folder):
        time.sleep(0.1)
    raise KeyError("lost")

def users_function(batches):
    raise ValueError("of the user's own job")

def users_other_function(batches):
    raise ValueError("in a job beside the run")

warnings.simplefilter("always")
warnings.filterwarnings("ignore", "distutils Version classes")  # of PySpark 3.5
# One task: as it fails, Spark 4.3 would interrupt others, and end the Python workers of all jobs.
other = spark.range(0, 1, 1, 1).mapInArrow(users_other_function, "id long")
print("BEGIN", file=sys.stderr, flush=True)
try:
    run = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=120).submit(fail)
    try:
        other.collect()
    except Exception as error:
        other_error = str(error)
        os.rmdir(folder)
    run.result()
except KeyError as error:
    print(error.__cause__, file=sys.stderr)
print("END", file=sys.stderr, flush=True)
try:
    spark.range(1).mapInArrow(users_function, "id long").collect()
except Exception:
    pass
facts = {"other error": other_error}
print("FACTS " + json.dumps(facts))
spark.stop()
"""


@pytest.mark.spark
@pytest.mark.slow
def test_a_failure_is_shown_once(
    run_driver: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_driver(A_FAILURE, env={"PYSPARK_PYTHON": sys.executable})
    facts = facts_in(done)
    of_run, _, users = done.stderr.partition("BEGIN\n")[2].partition("END\n")

    assert of_run.count('raise KeyError("lost")') == 1
    of_job = "ValueError: in a job beside the run"
    assert of_job in facts["other error"], facts["other error"]
    assert of_job in of_run, of_run
    assert len(set(re.findall(r"task \S+ in stage (\d+)", of_run))) == 1, "that of the other job"
    for noise in ("distributor-report", "[Stage", "Warning"):
        assert noise not in of_run
    assert all(line == line.lstrip("\r") for line in of_run.split("\n"))
    assert "ERROR Executor" in users, "Spark logs the error of the user's own job"
