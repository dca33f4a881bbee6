"""Runs through Spark Connect, runs whose nodes cannot reach the hub, executors without the package.

Each test runs a driver process, because a process has either a classic or a Connect session. All
tests of Connect are in this file and run one after another, because its local server has a fixed
port.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from conftest import facts_in, needs_connect, needs_java
from support.packages import environment, packed
from support.waiting import assert_gone, until

pytestmark = [pytest.mark.spark, needs_java]

both_sessions = pytest.mark.parametrize(
    "session", ["classic", pytest.param("connect", marks=needs_connect)]
)
THIS_PYTHON = {"PYSPARK_PYTHON": sys.executable}
SECRET = {"SPARK_CONNECT_AUTHENTICATE_TOKEN": "of this test"}

PRELUDE = '''
import hashlib, json, logging, os, random, signal, sys, threading, time

def open_session(kind):
    from pyspark.sql import SparkSession
    builder = SparkSession.builder
    if kind == "connect":
        return builder.remote("local[2]").getOrCreate()
    return builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()

class Broken(Exception):
    """An exception that only this driver has."""

def rank():
    return int(os.environ["RANK"])

def train(number):
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([number + rank()])
    dist.all_reduce(total)
    print("training on", rank())
    return rank(), dist.get_world_size(), total.item()

def fail_beside_one_that_waits(folder):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    deadline = time.monotonic() + 60
    while len(os.listdir(folder)) < 2:
        assert time.monotonic() < deadline, "the other rank is not up"
        time.sleep(0.02)
    if rank() == 1:
        raise Broken("no", 3)
    threading.Event().wait()

def die_beside_one_that_waits():
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()

def make_bytes(megabytes):
    return random.Random(rank()).randbytes(megabytes * 2**20)

def digest(value):
    return len(value), hashlib.sha256(value).hexdigest()

class Warnings(logging.Handler):
    """Collects the warnings of the package."""
    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []
        logging.getLogger("distributor").addHandler(self)
    def emit(self, record):
        self.messages.append(record.getMessage())
    def take(self):
        messages, self.messages = self.messages, []
        return messages

def error_of(call):
    try:
        call()
    except Exception as error:
        return error

def described(error):
    found = [type(error).__name__, isinstance(error, Broken), [str(a) for a in error.args]]
    return [*found, sorted(getattr(error, "rank_failures", {}))]

def outlived(folder):
    """Return the number of ranks, and those that still run 10 s after their run."""
    deadline = time.monotonic() + 10
    left = pids = os.listdir(folder)
    while left and time.monotonic() < deadline:
        left = [pid for pid in pids if os.path.exists("/proc/" + pid)]
        time.sleep(0.05)
    return len(pids), left

def print_facts(**facts):
    print("FACTS " + json.dumps(facts), flush=True)

warnings = Warnings()
'''


Driver = Callable[..., subprocess.CompletedProcess[str]]


@needs_connect
def test_runs_through_connect(run_driver: Driver, tmp_path: Path) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    made = environment(tmp_path / "made", "99.0", "iniconfig")
    archive = packed(made, tmp_path / "environment.tar.gz")
    done = run_driver(
        PRELUDE
        + """
spark = open_session("connect")
from distributor import TorchDistributor, WorkerDied

distributor = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=60)
value, large = distributor.run(lambda: (train(10), make_bytes(30)))
values = distributor.run_all(train, 20)
from importlib import metadata
in_packed = TorchDistributor(2, local_mode=False, use_gpu=False, environment=sys.argv[2])
versions = [runs.run_all(metadata.version, "iniconfig") for runs in (distributor, in_packed)]
broken = error_of(lambda: distributor.run(fail_beside_one_that_waits, sys.argv[1]))
died = error_of(lambda: distributor.run(die_beside_one_that_waits))
spark.conf.set("spark.distributor.hub.port", "7391")
print_facts(
    hub_port=TorchDistributor(1, use_gpu=False, warm=False).hub_port,
    value=value,
    values=values,
    versions=versions,
    broken=described(broken),
    left=outlived(sys.argv[1]),
    died=[type(died).__name__, getattr(died, "signal", None)],
    large=digest(large) == digest(random.Random(0).randbytes(30 * 2**20)),
    warned=warnings.take(),
)
spark.stop()
""",
        str(folder),
        str(archive),
        env={**THIS_PYTHON, "DISTRIBUTOR_CACHE": str(tmp_path / "cache")},
    )
    facts = facts_in(done)
    assert facts["versions"] == [[metadata.version("iniconfig")] * 2, ["99.0"] * 2]
    assert facts["hub_port"] == 7391, "of the server's conf"
    assert facts["value"] == [0, 2, 21]
    assert facts["values"] == [[0, 2, 41], [1, 2, 41]]
    assert facts["broken"] == ["Broken", True, ["no", "3"], [1]]
    assert facts["left"] == [2, []]
    assert facts["died"] == ["WorkerDied", 9]
    assert facts["large"] is True
    assert facts["warned"] == []
    shown = done.stdout.splitlines()
    assert [shown.count(f"[{rank}] training on {rank}") for rank in range(2)] == [2, 2]


def a_python_without_torch() -> str | None:
    """Return a folder whose ``python3`` cannot run ranks; None if there is none."""
    for folder in ("/usr/bin", "/bin"):
        python = shutil.which("python3", path=folder)
        probe = [python, "-c", "import pyarrow, torch"] if python else ["true"]
        if subprocess.run(probe, capture_output=True, check=False).returncode:
            return folder
    return None


@needs_connect
def test_a_python_that_cannot_run_ranks_is_reported(run_driver: Driver) -> None:
    folder = a_python_without_torch()
    if folder is None:
        pytest.skip("this machine's python3 can run ranks")
    done = run_driver(
        PRELUDE
        + """
os.environ.pop("PYSPARK_PYTHON", None)
spark = open_session("connect")
from distributor import TorchDistributor

distributor = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=60)
started = time.monotonic()
error = error_of(lambda: distributor.run(train, 10))
took = time.monotonic() - started
print_facts(kind=type(error).__name__, text=str(error), took=took, warned=warnings.take())
spark.stop()
""",
        env={"PATH": os.pathsep.join([folder, os.environ["PATH"]])},
    )
    facts = facts_in(done)
    assert facts["kind"] == "ExecutorNotReady", facts
    assert "PYSPARK_PYTHON" in facts["text"]
    assert len(facts["text"].splitlines()) == 1, facts["text"]
    assert facts["warned"] == []


@both_sessions
def test_without_the_hub_everything_is_sent_through_spark(
    session: str, run_driver: Driver, tmp_path: Path
) -> None:
    pids, logs = tmp_path / "pids", tmp_path / "logs"
    pids.mkdir()
    done = run_driver(
        PRELUDE
        + """
kind, pids, logs = sys.argv[1:]
spark = open_session(kind)
from distributor import TorchDistributor
from distributor.launch.spark import launcher
from distributor.launch.spark.hub_address import HubAddress

# The nodes connect to an address at which nothing listens.
launcher.choose_hub_address = lambda *_: HubAddress(bound="127.0.0.1", advertised="127.0.0.2")

distributor = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=60, log_dir=logs)
value, warned = distributor.run(train, 10), warnings.take()
found, warned_again = distributor.run_all(lambda: (train(20), make_bytes(20))), warnings.take()
broken = error_of(lambda: distributor.run(fail_beside_one_that_waits, pids))
print_facts(
    value=value,
    values=[value for value, _ in found],
    large=[digest(large) == digest(random.Random(r).randbytes(20 * 2**20))
           for r, (_, large) in enumerate(found)],
    broken=described(broken),
    left=outlived(pids),
    warned=[warned, warned_again],
)
spark.stop()
""",
        session,
        str(pids),
        str(logs),
        env=THIS_PYTHON,
    )
    facts = facts_in(done)
    assert facts["value"] == [0, 2, 21]
    assert facts["values"] == [[0, 2, 41], [1, 2, 41]]
    assert facts["large"] == [True, True]
    assert facts["broken"] == ["Broken", True, ["no", "3"], [1]]
    assert facts["left"] == [2, []]
    for warnings in facts["warned"]:
        assert len(warnings) == 1
        assert "hub_address" in warnings[0]
    assert "[0] training" not in done.stdout, "output of nodes without a link is not shown"
    printed = [path.read_text() for path in sorted(logs.glob("*/attempt_0/rank*.stdout"))]
    assert sorted(filter(None, printed)) == 2 * ["training on 0\n"] + 2 * ["training on 1\n"]


@both_sessions
def test_a_timeout_holds_without_the_hub(session: str, run_driver: Driver) -> None:
    done = run_driver(
        PRELUDE
        + """
spark = open_session(sys.argv[1])
from distributor import TorchDistributor
from distributor.launch.spark import launcher
from distributor.launch.spark.hub_address import HubAddress
from distributor.launch.spark.monitor import rendezvous

launcher.choose_hub_address = lambda *_: HubAddress(bound="127.0.0.1", advertised="127.0.0.2")
rendezvous.LINK_SECONDS = 4.0

def wait_forever():
    threading.Event().wait()

class TimedMessages(logging.Handler):
    def __init__(self):
        super().__init__()
        logging.getLogger("distributor").addHandler(self)
        logging.getLogger("distributor").setLevel(logging.INFO)
        self.notes = []
    def emit(self, record):
        self.notes.append([time.monotonic(), record.getMessage()])

timed = TimedMessages()
distributor = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=10)
error = error_of(lambda: distributor.run(wait_forever))
ended = time.monotonic()
print_facts(
    kind=type(error).__name__,
    message=str(error),
    stacks=error.stacks,
    notes=[[ended - at, text] for at, text in timed.notes],
    warned=warnings.take(),
    value=distributor.run(train, 10),
)
spark.stop()
""",
        session,
        env=THIS_PYTHON,
    )
    facts = facts_in(done)
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
def test_more_ranks_than_slots_through_connect(run_driver: Driver) -> None:
    done = run_driver(
        PRELUDE
        + """
spark = open_session("connect")
from distributor import TorchDistributor

began = time.monotonic()
distributor = TorchDistributor(4, local_mode=False, use_gpu=False, start_timeout=12)
error = error_of(lambda: distributor.run(train, 10))
took = time.monotonic() - began
fitting = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=60)
print_facts(kind=type(error).__name__, message=str(error), took=took, value=fitting.run(train, 10))
spark.stop()
""",
        env=THIS_PYTHON,
    )
    facts = facts_in(done)
    assert facts["kind"] == "StartTimeout", facts
    assert "Spark has started none of the 4 tasks" in facts["message"]
    assert "Ask for fewer ranks" in facts["message"]
    assert facts["took"] < 60, "before Spark itself gives up"
    assert facts["value"] == [0, 2, 21], "the failed job holds no slots"
    assert "Waiting: Spark has started none of the 4 tasks" in done.stderr
    assert "training with 4" not in done.stderr
    assert "Started distributed training with 2" in done.stderr


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
def test_a_node_without_a_link_joins_the_rendezvous_through_spark(
    run_driver: Driver, python_that_begins_with: Callable[[str], Path], tmp_path: Path
) -> None:
    python = python_that_begins_with(ALL_LINKS_BUT_ONE_FAIL.format(taken=str(tmp_path / "taken")))
    done = run_driver(
        PRELUDE
        + """
spark = open_session("classic")
from distributor import TorchDistributor

distributor = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=60)
found = distributor.run_all(lambda: (train(20), make_bytes(20)))
print_facts(
    values=[value for value, _ in found],
    large=[digest(large) == digest(random.Random(r).randbytes(20 * 2**20))
           for r, (_, large) in enumerate(found)],
    warned=warnings.take(),
)
spark.stop()
""",
        env={"PYSPARK_PYTHON": str(python)},
    )
    facts = facts_in(done)
    assert facts["values"] == [[0, 2, 41], [1, 2, 41]]
    assert facts["large"] == [True, True]
    (warning,) = facts["warned"]
    shown = [f"[{rank}] training on {rank}" in done.stdout for rank in range(2)]
    assert sorted(shown) == [False, True]
    assert f"Node {shown.index(False)} did not reach" in warning


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
"""Hides an installed package from an interpreter, however it was installed."""


@pytest.mark.parametrize(
    "session",
    [
        'master("local-cluster[2,1,1024]").config("spark.ui.enabled", "false")',
        pytest.param('remote("local[2]")', marks=[needs_connect, pytest.mark.slow]),
    ],
    ids=["classic", "connect"],
)
def test_executors_need_no_package(
    session: str,
    python_that_begins_with: Callable[[str], Path],
    run_driver: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    made = environment(tmp_path / "made", "1.0", bare=True)
    archive = packed(made, tmp_path / "environment.tar.gz")
    done = run_driver(
        f"""
import json, os, sys
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

def package_files():
    import cloudpickle, distributor
    print("in", os.environ["RANK"])
    return distributor.__file__, cloudpickle.__file__

def fail():
    raise Broken("no")

distributor = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=60)
first, second = distributor.run_all(package_files), distributor.run_all(package_files)
bare = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=60, environment=sys.argv[1])
second += bare.run_all(package_files)
try:
    distributor.run(fail)
except Broken as error:
    broken = list(error.args)
print("FACTS " + json.dumps(dict(
    without=[row.found for row in rows], first=first, second=second, broken=broken
)))
spark.stop()
""",
        str(archive),
        env={
            "PYSPARK_PYTHON": str(python_that_begins_with(ONLY_FROM_ARCHIVES)),
            "DISTRIBUTOR_CACHE": str(tmp_path / "cache"),
        },
    )
    facts = facts_in(done)
    assert facts["without"] == ["missing", "missing"], "the executors are not bare"
    assert len([*facts["first"], *facts["second"]]) == 6
    for of_rank in [*facts["first"], *facts["second"]]:
        assert len(of_rank) == 2
        assert all(".zip" in file for file in of_rank), of_rank
    assert facts["broken"] == ["no"]
    shown = done.stdout.splitlines()
    assert [shown.count(f"[{rank}] in {rank}") for rank in range(2)] == [3, 3]


SERVER = """
from pyspark.sql import SparkSession
SparkSession.builder.remote("local[2]").getOrCreate()
print("serving", flush=True)
sys.stdin.read()
"""
CLIENT = """
from pyspark.sql import SparkSession
from distributor import TorchDistributor

def wait(folder):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    threading.Event().wait()

SparkSession.builder.remote("sc://localhost:15002").getOrCreate()
TorchDistributor(2, local_mode=False, use_gpu=False).run(wait, sys.argv[1])
"""


@needs_connect
def test_ranks_do_not_outlive_a_connect_client_that_is_killed(tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    with (
        program(SERVER, tmp_path / "server.py") as server,
        program(CLIENT, tmp_path / "client.py", str(ranks), after=server) as client,
    ):
        until(lambda: len(list(ranks.iterdir())) == 2, "the ranks run", 120)
        client.kill()

        assert_gone(int(rank.name) for rank in ranks.iterdir())
        assert server.poll() is None, "the server continues"


@contextlib.contextmanager
def program(
    source: str, script: Path, *args: str, after: subprocess.Popen[str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run a program, after another one has printed that it is ready."""
    if after is not None:
        assert after.stdout
        assert any(line == "serving\n" for line in after.stdout)
    script.write_text(PRELUDE + source)
    command = [sys.executable, str(script), *args]
    pipe = subprocess.PIPE
    environment = {**os.environ, **THIS_PYTHON, **SECRET}
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
    with process:
        try:
            yield process
        finally:
            process.kill()
