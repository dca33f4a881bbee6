"""Runs through Spark Connect, and runs whose nodes cannot reach the hub.

A process has either a classic or a Connect session, so both are in driver programs. The tests of
Connect share one; they are in this file and run one after another, because its local server has a
fixed port.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import needs_connect, needs_java
from support.pages import PAGES, as_script, differences
from support.ports import free_port
from support.sessions import SECRET, SessionProgram, python_without_torch, session_program
from support.waiting import assert_gone, until

pytestmark = [pytest.mark.spark, needs_java]
StartClient = Callable[..., "subprocess.Popen[str]"]


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
    "predictions",
    "hub_port",
    "more_ranks_than_slots",
    *WITHOUT_HUB,
)


pytestmark = pytest.mark.xdist_group("connect")


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
def test_predictions(connect: SessionProgram) -> None:
    facts = connect.facts("predictions")
    for way in ("rows", "files", "udf"):
        assert facts[way] == [[at, at + 1] for at in range(100)], way
    assert facts["labels"] == 100
    assert facts["loaded"] is True


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
def test_a_run_with_one_node_that_has_no_link_goes_on_through_spark(tmp_path: Path) -> None:
    begins = ALL_LINKS_BUT_ONE_FAIL.format(taken=str(tmp_path / "taken"))
    with session_program("classic", tmp_path, "one_link", python_begins=begins) as program:
        facts = program.facts("one_link")
        printed = program.output("one_link")
    assert facts["values"] == [[0, 2, 41], [1, 2, 41]]
    assert facts["large"] == [True, True]
    (warning,) = facts["warned"]
    assert re.search("Node [01] did not reach", warning)
    assert "] training on" not in printed


CLIENT = """
import os, sys, threading, time
from pyspark.sql import SparkSession
from distributor import TorchDistributor

def wait(folder):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    while not os.path.exists(os.path.join(folder, "enough")):
        time.sleep(0.02)
    return "done"

SparkSession.builder.remote("sc://localhost:15002").getOrCreate()
ranks, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
print(TorchDistributor(ranks, local_mode=False, use_gpu=False, hub_port=port).run(wait, folder))
"""


@pytest.fixture
def client(connect: SessionProgram, tmp_path: Path) -> Iterator[StartClient]:
    """Return a function that starts another client of the server, and wait for its ranks."""
    connect.wait_until_it_serves()
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    with contextlib.ExitStack() as clients:

        def start(num_ranks: int, folder: Path, port: int = 0) -> subprocess.Popen[str]:
            folder.mkdir()
            started = clients.enter_context(
                subprocess.Popen(
                    [sys.executable, str(script), str(num_ranks), str(port), str(folder)],
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, **SECRET},
                )
            )
            clients.callback(started.kill)
            until(lambda: len(list(folder.iterdir())) == num_ranks, "the ranks run", 120)
            return started

        yield start


@needs_connect
def test_ranks_do_not_outlive_a_connect_client_that_is_killed(
    connect: SessionProgram, client: StartClient, tmp_path: Path
) -> None:
    client(2, tmp_path / "ranks").kill()

    assert_gone(ranks_in(tmp_path / "ranks"))
    assert connect.process.poll() is None, "the server continues"


@needs_connect
@pytest.mark.slow
def test_ranks_do_not_take_a_new_client_at_the_port_for_their_own(
    connect: SessionProgram, client: StartClient, tmp_path: Path
) -> None:
    port = free_port()
    old = client(1, tmp_path / "old", port)
    until(lambda: len(nodes_of(connect)) == 1, "the nodes of earlier runs have ended")
    [node] = nodes_of(connect)
    node.suspend()  # it looks for its driver only once the new one is there
    try:
        old.kill()
        new = client(1, tmp_path / "new", port)
    finally:
        node.resume()

    assert_gone(ranks_in(tmp_path / "old"))
    assert new.poll() is None, "the new client, which listens at the port, continues"
    (tmp_path / "new" / "enough").touch()
    output, _ = new.communicate(timeout=120)
    assert output.endswith("done\n")


@needs_connect
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


def ranks_in(folder: Path) -> list[int]:
    return [int(rank.name) for rank in folder.iterdir()]


def nodes_of(connect: SessionProgram) -> list[psutil.Process]:
    """Return the server's processes that are nodes of a run at present."""

    def is_node(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):  # it has ended
            return " ".join(process.cmdline()).startswith("distributor: node ")
        return False

    server = psutil.Process(connect.process.pid)
    return [process for process in server.children(recursive=True) if is_node(process)]
