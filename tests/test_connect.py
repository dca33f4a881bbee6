"""Runs through Spark Connect, and runs whose nodes cannot reach the hub.

A process has either a classic or a Connect session, so both are in driver programs. The tests of
Connect share one; they are in this file and run one after another, because its local server has a
fixed port.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import needs_connect, needs_java
from support.pages import PAGES, as_script, differences
from support.sessions import SECRET, SessionProgram, session_program
from support.waiting import assert_gone, until

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("connect"), needs_java, needs_connect]


@pytest.fixture(scope="module")
def connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionProgram]:
    """Start a program that has a Connect session, and runs scenarios."""
    with session_program(tmp_path_factory.mktemp("connect")) as program:
        yield program


def test_data_frames(connect: SessionProgram) -> None:
    facts = connect.facts("dataframes")
    for shares in (facts["executors"], facts["here"]):
        assert [len(share) for share in shares] == [51, 51]
        assert set(shares[0]) | set(shares[1]) == set(range(101))
    assert facts["odd"] == [{"a.b": [0, 1], "A.B": [0, -1]}, {"a.b": [2, 3], "A.B": [-2, -3]}]
    assert "bad row" in facts["error"]


@pytest.mark.slow
def test_predictions(connect: SessionProgram) -> None:
    facts = connect.facts("predictions")
    for way in ("rows", "files", "udf"):
        assert facts[way] == [[at, at + 1] for at in range(100)], way
    assert facts["labels"] == 100
    assert facts["loaded"] is True


def test_values_output_and_settings(connect: SessionProgram) -> None:
    facts = connect.facts("values")
    assert facts["value"] == [0, 2, 21]
    assert facts["large"] is True
    assert facts["port"] == 7391, "the conf of the server has settings"
    assert facts["warned"] == []
    shown = connect.output("values").splitlines()
    assert [shown.count(f"[{rank}] training on {rank}") for rank in range(2)] == [1, 1]


def test_failures(connect: SessionProgram) -> None:
    facts = connect.facts("failures")
    assert facts["broken"] == [True, ["no", "3"], [1]]
    assert facts["left"] == [2, []]
    assert facts["died"] == ["WorkerDied", 9]
    assert facts["warned"] == []


@pytest.mark.slow
def test_executors_need_no_package(connect: SessionProgram) -> None:
    """Neither Spark's Python has it nor that of an environment."""
    facts = connect.facts("bare_executors")
    assert facts["without"] == ["missing", "missing"], "the executors are not bare"
    assert [len(of_run) for of_run in facts["files"]] == [2, 2]
    for of_rank in [of_rank for of_run in facts["files"] for of_rank in of_run]:
        assert len(of_rank) == 2
        assert all(".zip" in file for file in of_rank), of_rank
    shown = connect.output("bare_executors").splitlines()
    assert [shown.count(f"[{rank}] in {rank}") for rank in range(2)] == [2, 2]


@pytest.mark.slow
def test_without_the_hub_everything_is_sent_through_spark(connect: SessionProgram) -> None:
    facts = connect.facts("through_spark")
    assert facts["values"] == [[0, 2, 41], [1, 2, 41]]
    assert facts["large"] == [True, True]
    assert facts["broken"] == [True, ["no", "3"], [1]]
    assert facts["left"] == [2, []]
    assert facts["argument"] == 3 * 2**20
    [warning] = facts["warned"]
    assert "hub_address" in warning
    shown = connect.output("through_spark")
    assert "[0] training" not in shown, "output of nodes without a link is not shown"
    logs = (connect.folder / "logs").glob("*/attempt_0/rank*.stdout")
    printed = [path.read_text() for path in sorted(logs)]
    assert sorted(filter(None, printed)) == ["training on 0\n", "training on 1\n"]


def test_a_timeout_holds_without_the_hub(connect: SessionProgram) -> None:
    facts = connect.facts("timeout_without_hub")
    assert facts["kind"] == "RunTimeout", facts
    assert set(facts["stacks"]) & {"0", "1"}
    assert "in wait_forever" in facts["message"]
    [warning] = facts["warned"]
    assert "did not reach this process" in warning
    before_end = {text.split()[0]: seconds for seconds, text in facts["notes"]}
    assert before_end["Nodes"] > 3, "long before the end"
    assert facts["value"] == [0, 2, 21], "the cancelled job holds no slots"


def test_more_ranks_than_slots_through_connect(connect: SessionProgram) -> None:
    facts = connect.facts("more_ranks_than_slots")
    assert facts["kind"] == "StartTimeout", facts
    assert "Spark has started none of the 4 tasks" in facts["message"]
    assert "Ask for fewer ranks" in facts["message"]
    assert facts["took"] < 60, "before Spark itself gives up"
    assert facts["value"] == [0, 2, 21], "the failed job holds no slots"
    shown = connect.output("more_ranks_than_slots", "stderr")
    assert "Waiting: Spark has started none of the 4 tasks" in shown
    assert "training with 4" not in shown
    assert "Started distributed training with 2" in shown


CLIENT = """
import os, sys, threading
from pyspark.sql import SparkSession
from distributor import TorchDistributor

def wait(folder):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    threading.Event().wait()

SparkSession.builder.remote("sc://localhost:15002").getOrCreate()
TorchDistributor(2, local_mode=False, use_gpu=False).run(wait, sys.argv[1])
"""


def test_ranks_do_not_outlive_a_connect_client_that_is_killed(
    connect: SessionProgram, tmp_path: Path
) -> None:
    connect.wait_until_it_serves()
    command = [sys.executable, "-c", CLIENT, str(tmp_path)]
    with subprocess.Popen(command, env={**os.environ, **SECRET}) as client:
        try:
            until(lambda: len(list(tmp_path.iterdir())) == 2, "the ranks run", 120)
        finally:
            client.kill()

    assert_gone(int(rank.name) for rank in tmp_path.iterdir())
    assert connect.process.poll() is None, "the server continues"


@pytest.mark.slow
def test_the_program_of_the_page(connect: SessionProgram, tmp_path: Path) -> None:
    page = PAGES / "how-to" / "connect.md"
    connect.wait_until_it_serves()
    done = subprocess.run(
        [sys.executable, "-c", as_script(page)],
        env={**os.environ, **SECRET, "SPARK_REMOTE": "sc://localhost:15002"},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert differences(page, done.stdout) == []
