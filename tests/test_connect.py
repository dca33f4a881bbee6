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
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from conftest import needs_connect, needs_java
from support.sessions import SECRET, SessionProgram, python_without_torch, session_program
from support.waiting import assert_gone, until

pytestmark = [pytest.mark.spark, needs_java]


def also(kind: str) -> pytest.MarkDecorator:
    """Run a test through Connect, whose program starts anyway, and, as a slow test, on `kind`."""
    kinds = [
        pytest.param(kind, marks=pytest.mark.slow),
        pytest.param("connect", marks=needs_connect),
    ]
    return pytest.mark.parametrize("session", kinds, indirect=True)


WITHOUT_HUB = ("through_spark", "timeout_without_hub")
OF_CONNECT = (
    "wrong_python",
    "bare_executors",
    "values",
    "environments",
    "failures",
    "dataframes",
    "hub_port",
    "more_ranks_than_slots",
    *WITHOUT_HUB,
)


@pytest.fixture(scope="module")
def connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionProgram]:
    """Start a program that has a Connect session, runs all scenarios, and then serves others."""
    with session_program("connect", tmp_path_factory.mktemp("connect"), *OF_CONNECT) as program:
        yield program


@pytest.fixture(scope="module")
def classic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionProgram]:
    """Start a program that has a classic session, and runs the scenarios without the hub."""
    with session_program("classic", tmp_path_factory.mktemp("classic"), *WITHOUT_HUB) as program:
        yield program


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionProgram]:
    """Start a program whose session has two executors without this package."""
    folder = tmp_path_factory.mktemp("cluster")
    with session_program("cluster", folder, "bare_executors") as program:
        yield program


@pytest.fixture
def session(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@needs_connect
def test_data_frames(connect: SessionProgram) -> None:
    facts = connect.facts("dataframes")
    for shares in (facts["executors"], facts["here"]):
        assert [len(share) for share in shares] == [51, 51]
        assert set(shares[0]) | set(shares[1]) == set(range(101))
    assert facts["odd"] == [{"a.b": [0, 1], "A.B": [0, -1]}, {"a.b": [2, 3], "A.B": [-2, -3]}]
    assert "bad row" in facts["error"]


@needs_connect
def test_values_and_output(connect: SessionProgram) -> None:
    facts = connect.facts("values")
    assert facts["value"] == [0, 2, 21]
    assert facts["large"] is True
    assert facts["values"] == [[0, 2, 41], [1, 2, 41]]
    assert facts["warned"] == []
    shown = connect.output("values").splitlines()
    assert [shown.count(f"[{rank}] training on {rank}") for rank in range(2)] == [2, 2]


@needs_connect
def test_ranks_in_a_packed_environment(connect: SessionProgram) -> None:
    facts = connect.facts("environments")
    assert facts["versions"] == [[metadata.version("iniconfig")] * 2, ["99.0"] * 2]
    assert facts["warned"] == []


@needs_connect
def test_failures(connect: SessionProgram) -> None:
    facts = connect.facts("failures")
    assert facts["broken"] == ["Broken", True, ["no", "3"], [1]]
    assert facts["left"] == [2, []]
    assert facts["died"] == ["WorkerDied", 9]
    assert facts["warned"] == []


@needs_connect
def test_the_conf_of_the_server_has_settings(connect: SessionProgram) -> None:
    assert connect.facts("hub_port")["port"] == 7391


@also("cluster")
def test_executors_need_no_package(session: SessionProgram) -> None:
    """Neither Spark's Python has it nor that of an environment."""
    facts = session.facts("bare_executors")
    assert facts["without"] == ["missing", "missing"], "the executors are not bare"
    assert [len(of_run) for of_run in facts["files"]] == [2, 2, 2]
    for of_rank in [of_rank for of_run in facts["files"] for of_rank in of_run]:
        assert len(of_rank) == 2
        assert all(".zip" in file for file in of_rank), of_rank
    assert facts["broken"][1:3] == [True, ["no"]]
    shown = session.output("bare_executors").splitlines()
    assert [shown.count(f"[{rank}] in {rank}") for rank in range(2)] == [3, 3]


@needs_connect
@pytest.mark.skipif(not python_without_torch(), reason="this machine's python3 can run ranks")
def test_a_python_that_cannot_run_ranks_is_reported(connect: SessionProgram) -> None:
    facts = connect.facts("wrong_python")
    assert facts["kind"] == "ExecutorNotReady", facts
    assert "PYSPARK_PYTHON" in facts["text"]
    assert len(facts["text"].splitlines()) == 1, facts["text"]
    assert facts["warned"] == []


@also("classic")
def test_without_the_hub_everything_is_sent_through_spark(session: SessionProgram) -> None:
    facts = session.facts("through_spark")
    assert facts["value"] == [0, 2, 21]
    assert facts["values"] == [[0, 2, 41], [1, 2, 41]]
    assert facts["large"] == [True, True]
    assert facts["broken"] == ["Broken", True, ["no", "3"], [1]]
    assert facts["left"] == [2, []]
    assert facts["argument"] == 3 * 2**20
    for warnings in facts["warned"]:
        assert len(warnings) == 1
        assert "hub_address" in warnings[0]
    shown = session.output("through_spark")
    assert "[0] training" not in shown, "output of nodes without a link is not shown"
    logs = (session.folder / "logs").glob("*/attempt_0/rank*.stdout")
    printed = [path.read_text() for path in sorted(logs)]
    assert sorted(filter(None, printed)) == 2 * ["training on 0\n"] + 2 * ["training on 1\n"]


@also("classic")
def test_a_timeout_holds_without_the_hub(session: SessionProgram) -> None:
    facts = session.facts("timeout_without_hub")
    assert facts["kind"] == "RunTimeout", facts
    assert set(facts["stacks"]) & {"0", "1"}
    assert "in wait_forever" in facts["message"]
    [warning] = facts["warned"]
    assert "did not reach this process" in warning
    before_end = {text.split()[0]: seconds for seconds, text in facts["notes"]}
    assert before_end["Nodes"] > 5, "long before the end"
    assert before_end["Started"] > 5
    assert facts["value"] == [0, 2, 21], "the cancelled job holds no slots"


@needs_connect
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


ALL_LINKS_BUT_ONE_FAIL = """
import os, sys

def look(event, args):
    if event != "socket.connect":
        return
    frame = sys._getframe()
    while frame and not frame.f_code.co_filename.endswith(os.path.join("wire", "link.py")):
        frame = frame.f_back
    if frame:
        try:
            os.close(os.open({taken!r}, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            raise ConnectionRefusedError("cut off") from None

sys.addaudithook(look)
"""


@pytest.mark.slow
def test_a_node_without_a_link_joins_the_rendezvous_through_spark(tmp_path: Path) -> None:
    begins = ALL_LINKS_BUT_ONE_FAIL.format(taken=str(tmp_path / "taken"))
    with session_program("classic", tmp_path, "one_link", python_begins=begins) as program:
        facts = program.facts("one_link")
        printed = program.output("one_link")
    assert facts["values"] == [[0, 2, 41], [1, 2, 41]]
    assert facts["large"] == [True, True]
    (warning,) = facts["warned"]
    shown = [f"[{rank}] training on {rank}" in printed for rank in range(2)]
    assert sorted(shown) == [False, True]
    assert f"Node {shown.index(False)} did not reach" in warning


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


@needs_connect
def test_ranks_do_not_outlive_a_connect_client_that_is_killed(
    connect: SessionProgram, tmp_path: Path
) -> None:
    ranks, script = tmp_path / "ranks", tmp_path / "client.py"
    ranks.mkdir()
    script.write_text(CLIENT)
    connect.wait_until_it_serves()
    command = [sys.executable, str(script), str(ranks)]
    with subprocess.Popen(command, env={**os.environ, **SECRET}) as client:
        try:
            until(lambda: len(list(ranks.iterdir())) == 2, "the ranks run", 120)
        finally:
            client.kill()

    assert_gone(int(rank.name) for rank in ranks.iterdir())
    assert connect.process.poll() is None, "the server continues"
