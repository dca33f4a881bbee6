"""Process titles show what a process is and of which run; nothing else about it changes."""

from __future__ import annotations

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


def test_ps_shows_the_run_of_a_rank_and_its_supervisor() -> None:
    token = {"SECRET_TOKEN": "swordfish"}
    ranks = TorchDistributor(2, use_gpu=False, timeout=120, env=token)
    for rank, seen in enumerate(ranks.run_all(my_training)):
        of_rank, of_supervisor, above = seen["titles"]
        assert re.fullmatch(f"distributor: rank {rank} of my_training {RUN}", of_rank)
        assert re.fullmatch(f"distributor: supervisor of my_training {RUN}", of_supervisor)
        assert seen["names"][1] == "supervisor:my_t"
        if not RENAMES_PROCESSES:
            assert seen["names"][0] == f"rank{rank}:my_training"[:15]
        assert re.fullmatch(r"distributor: zygote for process \d+", above)
        assert "swordfish" not in str(seen)
        assert seen["argv"] == ["my_training"]
        assert seen["orig_argv"][0] == "-c"
        assert "bootstrap.main" in seen["orig_argv"][1]
        assert "multiprocessing.resource_tracker" in seen["tracker"]
        assert seen["program"] == "sleep 9"
