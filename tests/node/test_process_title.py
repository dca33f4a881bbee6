"""Process titles show what a process is and of which run; nothing else about it changes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from distributor import TorchDistributor
from distributor.core.versions import release
from distributor.spark.session import Session

cloudpickle.register_pickle_by_value(sys.modules[__name__])
RENAMES_PROCESSES = release(torch.__version__) == (2, 4)
"""Whether a process that imports torch gets another name."""

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
pytestmark = linux_only
RUN = r"\(\d{8}-\d{6}-[0-9a-f]{8}\)"


def ps(pid: int, column: str) -> str:
    shown = subprocess.run(["ps", "-ww", "-o", f"{column}=", "-p", str(pid)], capture_output=True)
    return shown.stdout.decode().rstrip("\n")


def my_training() -> dict[str, Any]:
    """Return the titles of a rank and its ancestors, and Python's copies of the command line."""
    import os
    from multiprocessing import resource_tracker, shared_memory

    import psutil

    memory = shared_memory.SharedMemory(create=True, size=1)
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    memory.close()
    memory.unlink()
    above = [os.getpid(), *(parent.pid for parent in psutil.Process().parents()[:2])]
    return {
        "titles": [ps(pid, "args") for pid in above],
        "names": [ps(pid, "comm") for pid in above],
        "argv": sys.argv,
        "orig_argv": sys.orig_argv[1:3],
        "tracker": Path(f"/proc/{tracker}/cmdline").read_text(),
        "program": ps(subprocess.Popen(["sleep", "9"]).pid, "args"),
    }


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "fresh"])
def test_ps_shows_the_run_of_a_rank_and_its_supervisor(warm: bool) -> None:
    token = {"SECRET_TOKEN": "swordfish"}
    ranks = TorchDistributor(2, use_gpu=False, timeout=120, warm=warm, env=token)
    for rank, seen in enumerate(ranks.run_all(my_training)):
        of_rank, of_supervisor, above = seen["titles"]
        assert re.fullmatch(f"distributor: rank {rank} of my_training {RUN}", of_rank)
        assert re.fullmatch(f"distributor: supervisor of my_training {RUN}", of_supervisor)
        assert seen["names"][1] == "supervisor:my_t"
        if not RENAMES_PROCESSES:
            assert seen["names"][0] == f"rank{rank}:my_training"[:15]
        if warm:
            assert re.fullmatch(r"distributor: zygote for process \d+", above)
            assert RENAMES_PROCESSES or seen["names"][2] == "zygote"
        assert "swordfish" not in str(seen)
        assert seen["argv"] == ["my_training"]
        assert seen["orig_argv"][0] == "-c"
        assert "bootstrap.main" in seen["orig_argv"][1]
        assert "multiprocessing.resource_tracker" in seen["tracker"]
        assert seen["program"] == "sleep 9"


@pytest.mark.spark
def test_the_title_of_a_spark_worker_is_restored_after_the_run(spark: Any) -> None:
    def workers() -> list[str]:
        import psutil

        titles = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                titles.append(" ".join(process.cmdline()))
        return titles

    def own_title(batches: Any) -> Any:
        import pyarrow

        for _ in batches:
            pass
        with open("/proc/self/cmdline") as file:
            yield pyarrow.RecordBatch.from_pydict({"title": [file.read()]})

    ranks = TorchDistributor(4, local_mode=False, use_gpu=False, timeout=120)
    for rank, titles in enumerate(ranks.run_all(workers)):
        own = f"distributor: node {rank} of workers ("
        assert any(title.startswith(own) for title in titles), titles
    frame = spark.range(0, 4, 1, 4)
    rows = Session(spark).map_in_arrow(frame, own_title, "title string", barrier=True).collect()
    assert all("pyspark.daemon" in row.title for row in rows), rows


LOOK = """
import json, sys
from pathlib import Path
from distributor.node.process.process_title import temporary_run_title, set_title

def look():
    return [Path("/proc/self", name).read_text() for name in ("cmdline", "environ", "comm")]

before = look()
with temporary_run_title(sys.argv[1], "program", "run"):
    during = look()
after = look()
set_title(sys.argv[1], "a name with spaces")
print(json.dumps([before, during, after, look()]))
"""


def look(command: list[str], source: str | None = None) -> list[list[str]]:
    done = subprocess.run(
        command,
        executable=sys.executable,
        input=source,
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        check=True,
    )
    looks: list[list[str]] = json.loads(done.stdout)
    return looks


def test_a_title_is_cut_to_the_memory_of_the_command_line() -> None:
    before, during, after, last = look(["python", "-c", LOOK, "\N{SNOWMAN}\n" * 9999])
    room = len(before[0].encode())
    assert during[0].startswith("distributor: \N{SNOWMAN} \N{SNOWMAN} ")
    assert during[0].endswith("\0")
    assert room > 4096
    assert 250 < len(during[0].encode()) < 260
    assert during[1] == before[1] == last[1], "the environment is stored behind the command line"
    assert during[2] == before[2]
    assert after == before
    assert last[2] == "a_name_with_spa\n"


def test_a_command_line_that_is_too_short_is_not_changed() -> None:
    before, during, after, last = look(["p", "-", "a title"], LOOK)
    assert before[0] == "p\0-\0a title\0"
    assert before[:1] == during[:1] == after[:1] == last[:1]
