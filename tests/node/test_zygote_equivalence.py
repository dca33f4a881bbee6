"""Ranks that are forked from a zygote find what ranks in new interpreters find."""

from __future__ import annotations

import contextlib
import gc
import locale
import os
import random
import re
import resource
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from support.zygotes import kill_zygotes, local, zygote_of

from distributor.core.versions import release
from distributor.node.process.supervisor import is_supported

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [
    pytest.mark.skipif(not is_supported(), reason="only Linux has warm processes"),
    pytest.mark.usefixtures("modules_folder"),
]


OF_EACH_RUN = ("DISTRIBUTOR_PROGRAM", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
SIGNAL_SETS = ("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")
BUFFERING = ("line_buffering", "write_through")


def facts_of_this_rank() -> dict[str, Any]:
    """Record the attributes of a rank and its process, before and after it imports torch."""
    status = dict(re.findall(r"(\w+):\s*(.*)", Path("/proc/self/status").read_text()))
    facts: dict[str, Any] = {
        "environment": {k: v for k, v in os.environ.items() if k not in OF_EACH_RUN},
        "folder": os.getcwd(),
        "umask": status["Umask"],
        "signal sets": {name: status[name] for name in SIGNAL_SETS},
        "signal handlers": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
        "limits": {
            name: resource.getrlimit(getattr(resource, name))
            for name in dir(resource)
            if name.startswith("RLIMIT_")
        },
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "main thread": threading.current_thread() is threading.main_thread(),
        "leads": [os.getpid() == leader for leader in (os.getpgid(0), os.getsid(0))],
        "arguments": sys.argv,
        "path": sys.path,
        "names in main": sorted(vars(sys.modules["__main__"])),
        "streams": [
            {name: getattr(stream, name) for name in ("encoding", "errors", "newlines", *BUFFERING)}
            | {name: getattr(stream, name)() for name in ("fileno", "isatty", "seekable")}
            for stream in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "garbage collector": (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
        "flags": str(sys.flags),
        "hooks": [str(hook) for hook in (sys.excepthook, threading.excepthook, sys.gettrace())],
        "locale": (locale.setlocale(locale.LC_ALL), locale.getpreferredencoding()),
        "time zone": (time.tzname, time.timezone, time.localtime(0).tm_hour),
    }
    import numpy as np
    import torch
    from threadpoolctl import threadpool_info

    pools = [(pool["internal_api"], pool["num_threads"]) for pool in threadpool_info()]
    return {
        **facts,
        "open files": open_files(),  # a fresh rank 0 serves the store once torch is imported
        "torch's threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "libraries' threads": sorted(pools),
        "warnings": [str(rule) for rule in warnings.filters],
        "draws": {
            "random": random.random(),
            "numpy": float(np.random.rand()),
            "torch": float(torch.rand((), dtype=torch.float64)),
            "torch seed": torch.initial_seed(),
        },
    }


def open_files() -> list[str]:
    """List what kind of file each open descriptor is."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor by which the folder itself is read
            found.append(re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{number}")))
    return sorted(found)


RUNS: dict[str, dict[str, Any]] = {
    "two ranks": {"num_processes": 2},  # OMP_NUM_THREADS is 1 for each of several ranks
    "one rank": {},  # OMP_NUM_THREADS is not set
    "two threads": {"env": {"OMP_NUM_THREADS": "2", "OF_THIS_RUN": "1"}},
}
NO_IDLE_IMPORTS = """
import numpy.random
from distributor.node.process import zygote
# This runs in the zygote, which must have loaded the same modules whenever it is asked.
zygote.IDLE_IMPORTS = ()
"""

Reports = dict[str, list[dict[str, Any]]]
"""What each rank of a run has recorded, by the kind of run."""


@pytest.fixture(scope="module")
def reports(modules_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Reports, ...]:
    """Run the same ranks forked, forked once more, and fresh, and return their reports.

    The zygote starts before the driver changes its folder, its environment and its signals.
    """
    (modules_folder / "no_idle_imports.py").write_text(NO_IDLE_IMPORTS)
    kill_zygotes()
    with ignoring_signals():
        zygote = zygote_of(2, preload=["no_idle_imports"])
    umask = os.umask(0o027)
    try:
        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(RUNS)) as pool:
            patch.chdir(tmp_path_factory.mktemp("folder"))
            patch.setenv("TZ", "Asia/Kathmandu")
            patch.setenv("OF_THE_DRIVER", "naïve \udcff\n")
            patch.delenv("OMP_NUM_THREADS", raising=False)
            assert zygote_of() == zygote
            forked: list[Reports] = [
                {name: local(**run).run_all(facts_of_this_rank) for name, run in RUNS.items()}
                for _ in range(2)
            ]
            fresh = {
                name: pool.submit(local(warm=False, **run).run_all, facts_of_this_rank)
                for name, run in RUNS.items()
            }
            return forked[0], forked[1], {run: report.result() for run, report in fresh.items()}
    finally:
        os.umask(umask)


@contextmanager
def ignoring_signals() -> Iterator[None]:
    """Ignore one signal and block another; children inherit that."""
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGUSR1, handler)


def test_forked_ranks_equal_fresh_ones(reports: tuple[Reports, ...]) -> None:
    differ = {"draws"}
    if release(torch.__version__) == (2, 4):
        differ.add("open files")  # the number of sockets of its store varies between starts
    compared = [{run: [] for run in RUNS} for _ in reports]
    for of_way, report in zip(compared, reports, strict=True):
        for run, ranks in report.items():
            of_way[run] = [{k: rank[k] for k in rank.keys() - differ} for rank in ranks]
    first, second, fresh = compared
    assert first == fresh
    assert second == fresh


@pytest.mark.parametrize("source", ["random", "numpy", "torch", "torch seed"])
def test_each_rank_of_each_run_draws_different_random_numbers(
    reports: tuple[Reports, ...], source: str
) -> None:
    *forked, fresh = (
        [rank["draws"][source] for ranks in report.values() for rank in ranks] for report in reports
    )
    assert len(set(fresh)) == len(fresh) == 4, "fresh ranks draw different numbers"
    drawn = [number for report in forked for number in report]
    assert len(drawn) == 8
    assert max(Counter(drawn).values()) == 1
