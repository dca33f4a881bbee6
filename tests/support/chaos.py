"""``make chaos``: inject each fault into runs of each launcher, and print a table of the results.

PySpark's own class is tested the same way, as far as possible, so that the table compares both.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from support.cluster import Cluster, Driver, cluster_on
from support.machines import Machine, machines_apart, machines_on_loopback, why_not_apart
from support.two_machines import STOPS_ITSELF
from support.waiting import alive, comes_true

RANKS = 2
STARTS_IN, REPORTS_IN, ENDS_IN = 90.0, 60.0, 10.0
"""Seconds until the ranks are connected, the driver reports the fault, and nothing is left."""
OTHERS = "spark|torchinductor"
"""Matches the temporary files of Spark, and torch's cache for this user."""
SHARED_MEMORY = Path("/dev/shm")

SOURCE = """
def work(folder, activity):
    import ctypes, json, os, pathlib, signal, subprocess, time
    from multiprocessing.connection import Listener
    from multiprocessing.shared_memory import SharedMemory
    import torch, torch.distributed as dist
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    segment = SharedMemory(create=True, size=1000)
    socket = Listener(family="AF_UNIX")
    child = os.fork()
    if child == 0:
        signal.pause()
    session = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if activity == "ignores SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note = pathlib.Path(folder, str(rank))
    facts = [os.getpid(), child, session.pid], int(os.environ["MASTER_PORT"]), segment.name
    note.with_suffix(".part").write_text(json.dumps(facts))
    note.with_suffix(".part").rename(note.with_suffix(".json"))
    while not pathlib.Path(folder, "fault").exists():
        if activity == "computes":
            torch.rand(64, 64) @ torch.rand(64, 64)
        elif activity == "reduces":
            dist.all_reduce(torch.ones(1))
        elif activity == "holds the GIL":
            ctypes.PyDLL(None).usleep(10_000)
        else:
            time.sleep(0.01)
    if rank == 1:
        fault = pathlib.Path(folder, "fault").read_text()
        if fault == "raises":
            raise KeyError("on purpose")
        if fault == "exits":
            os._exit(3)
    if activity == "holds the GIL":
        ctypes.PyDLL(None).sleep(1000)
    while True:
        if activity == "reduces":
            dist.all_reduce(torch.ones(1))
        else:
            time.sleep(0.01)

for line in _channel.makefile():
    try:
        {distributor}.run(work, *json.loads(line))
    except BaseException as error:
        send(error=type(error).__name__, message=str(error)[:4000])
time.sleep(1000)
"""
STUCK = """
import threading
from distributor import Listener
from distributor.control import sink as listeners

listeners.PATIENCE = 2.0

class Stuck(Listener):
    def begins(self, attempt, ranks):
        threading.Event().wait()
"""
LEAVING = """
from distributor.launchers.spark.gang import Gang

gather = Gang.gather

def leave_and_gather(gang, *args, **kwargs):
    if not gang.is_new:
        gang.leave({gang.members[-1].executor_id})
    return gather(gang, *args, **kwargs)

Gang.gather = leave_and_gather
"""
OURS = "TorchDistributor(2, local_mode={local}, use_gpu=False, {settings})"
PYSPARKS = (
    "__import__('pyspark.ml.torch.distributor', fromlist=['x'])"
    ".TorchDistributor(2, local_mode={local}, use_gpu=False)"
)


class Fault(NamedTuple):
    """A fault, and the error that the driver should report, or any if it is empty."""

    error: str = ""
    message: str = ""
    victim: Callable[[Cluster, Driver, int], int] | None = None
    """Finds the process that is killed or stopped; otherwise a rank fails, or a host is cut off."""
    before: str = ""
    """What the driver runs before."""
    settings: str = ""
    """The settings of the driver."""


def _machine_of(cluster: Cluster, pid: int) -> Machine:
    address = psutil.Process(pid).environ()["SPARK_LOCAL_IP"]
    return next(machine for machine in cluster.on_workers if machine.address == address)


def _near(role: str) -> Callable[[Cluster, Driver, int], int]:
    """Find the one process with a role on the machine of a rank."""
    return lambda cluster, driver, rank: cluster.find(role, _machine_of(cluster, rank))[0].pid


ORDINARY = "a task leaves before each attempt"
"""A fault of tasks of an ordinary job alone; Spark ends a job whose task has failed four times."""
CUT_OFF, DRIVER_KILLED = "a host is cut off", "the driver is killed"
RAISED = "KeyError", "on purpose"
ANYWHERE = {
    "a rank raises": Fault(*RAISED),
    "a rank exits": Fault("WorkerDied", "code 3"),
    "a rank is killed": Fault("WorkerDied", "SIGKILL", lambda cluster, driver, rank: rank),
    "a rank's parent is killed": Fault(
        victim=lambda cluster, driver, rank: psutil.Process(rank).ppid()
    ),
    DRIVER_KILLED: Fault(victim=lambda cluster, driver, rank: driver.process.pid),
    "a listener never returns": Fault(*RAISED, before=STUCK, settings="listeners=Stuck()"),
}
ON_A_CLUSTER = {
    "an agent is killed": Fault("NodeLost", "Python worker exited", _near("agent")),
    "an agent is stopped": Fault("NodeLost", "no sign of life", _near("agent")),
    "an executor is killed": Fault("NodeLost", "ExecutorLostFailure", _near("executor")),
    "the driver's JVM is killed": Fault(
        victim=lambda cluster, driver, rank: cluster.find("driver_jvm")[0].pid
    ),
    CUT_OFF: Fault("NodeLost", "no sign of life"),
    ORDINARY: Fault(*RAISED, before=LEAVING, settings="max_failures=6"),
}
FAULTS = {"local": ANYWHERE, "cluster": ANYWHERE | ON_A_CLUSTER}
"""The faults by the launcher of the runs into which they are injected."""
DRIVERS_END = (DRIVER_KILLED, "the driver's JVM is killed", CUT_OFF)
"""Faults after which a driver cannot start the next run."""
SETTINGS = {"warm": "warm=True", "fresh": "warm=False", "ordinary": "barrier=False"}
STARTS = (*SETTINGS, "pyspark")
ACTIVITIES = ("waits", "computes", "reduces", "holds the GIL", "ignores SIGTERM")


class Case(NamedTuple):
    """A fault of `FAULTS`, and into which of `STARTS` on which launcher it is injected."""

    launcher: str
    start: str
    fault: str

    @property
    def is_possible(self) -> bool:
        fault = FAULTS[self.launcher][self.fault]
        if self.start == "pyspark":  # whose class has no settings, and needs host names
            return not fault.before and self.fault != CUT_OFF
        if self.fault == ORDINARY:
            return self.start == "ordinary"
        if self.launcher == "local":
            return self.start != "ordinary"
        return self.fault != CUT_OFF or not why_not_apart()


class Note(NamedTuple):
    """What a rank reports: its processes, itself first, its store's port, its segment."""

    family: list[int]
    port: int
    segment: str


class Result(NamedTuple):
    """Whether the driver reported the cause of a fault, after how long, and what was left."""

    seconds: float | None
    right: bool
    processes: int
    files: int
    ports: int
    segments: int

    @property
    def spotless(self) -> bool:
        return self.right and not any(self[2:])


class Series:
    """Runs with one fault each, one after another, of one driver as long as it lives."""

    def __init__(self, cluster: Cluster, case: Case) -> None:
        self._cluster = cluster
        self._case = case
        self._fault = FAULTS[case.launcher][case.fault]
        self._driver: Driver | None = None

    def close(self) -> None:
        """End the driver."""
        if self._driver is not None:
            self._driver.__exit__()
            self._driver = None

    def hurt(self, activity: str) -> Result:
        """Start a run, inject the fault, and return the result."""
        driver = self._driver = self._driver or self._start_driver()
        files = self._temporary_files()
        folder = Path(tempfile.mkdtemp(dir=self._cluster.folder))
        driver.send([str(folder), activity])
        ranks = self._await_ranks(driver, folder)
        if self._case.start != "pyspark":
            assert self._cluster.listens(ranks[0].port)  # or its end would prove nothing
        at = time.time()
        self._strike(driver, folder, ranks[1].family[0])
        report = None
        if self._case.fault != DRIVER_KILLED:
            with contextlib.suppress(AssertionError, TimeoutError):
                report = driver.receive("error", REPORTS_IN)
        left = self._await_end(ranks, files)
        if self._case.fault == CUT_OFF:
            for machine in self._cluster.on_workers:
                machine.mend()
        seconds = None if report is None else report["at"] - at
        result = Result(seconds, self._is_right(report), *left)
        if not result.spotless or self._case.fault in DRIVERS_END:
            self.close()
        return result

    def _start_driver(self) -> Driver:
        local, start = self._case.launcher == "local", self._case.start
        template = PYSPARKS if start == "pyspark" else OURS
        settings = f"{SETTINGS.get(start)}, {self._fault.settings}"
        distributor = template.format(local=local, settings=settings)
        return self._cluster.driver(
            self._fault.before + SOURCE.format(distributor=distributor),
            with_spark=not local or start == "pyspark",
            **({"spark.master": "local[2]"} if local else {}),
        )

    def _await_ranks(self, driver: Driver, folder: Path) -> list[Note]:
        """Return the notes of the ranks, once they are connected."""

        def notes() -> list[Path]:
            return sorted(folder.glob("*.json"))

        comes_true(lambda: len(notes()) == RANKS or driver.process.poll() is not None, STARTS_IN)
        if len(notes()) < RANKS:
            raise RuntimeError(f"no ranks: {driver.log.read_text()[-4000:]}")
        return [Note._make(json.loads(note.read_text())) for note in notes()]

    def _strike(self, driver: Driver, folder: Path, rank: int) -> None:
        if self._case.fault == CUT_OFF:
            _machine_of(self._cluster, rank).cut()
        elif victim := self._fault.victim:
            sign = signal.SIGSTOP if "stopped" in self._case.fault else signal.SIGKILL
            os.kill(victim(self._cluster, driver, rank), sign)
        else:
            ending = "exits" if self._case.fault == "a rank exits" else "raises"
            (folder / "fault.part").write_text(ending)
            (folder / "fault.part").rename(folder / "fault")

    def _is_right(self, report: dict[str, Any] | None) -> bool:
        if report is None:
            return self._case.fault == DRIVER_KILLED
        is_error = self._fault.error in ("", report["error"])
        return is_error and self._fault.message in report["message"]

    def _await_end(self, ranks: list[Note], files: set[str]) -> tuple[int, int, int, int]:
        """Wait until nothing is left, count what is, and kill the processes that are left."""
        pids = [pid for rank in ranks for pid in rank.family]

        def left() -> tuple[int, int, int, int]:
            return (
                len(alive(pids)),
                len(self._temporary_files() - files),
                int(self._cluster.listens(ranks[0].port)),
                sum((SHARED_MEMORY / rank.segment).exists() for rank in ranks),
            )

        comes_true(
            lambda: not any(left()), STOPS_ITSELF if self._case.fault == CUT_OFF else ENDS_IN
        )
        found = left()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found

    def _temporary_files(self) -> set[str]:
        return {name for name in os.listdir(self._cluster.temporary) if not re.search(OTHERS, name)}


@contextlib.contextmanager
def bed(launcher: str, *, apart: bool = True) -> Iterator[Cluster]:
    """Create a cluster for fault injection; for local runs, only the driver's machine."""
    apart = apart and launcher == "cluster" and not why_not_apart()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        (machines_apart if apart else machines_on_loopback)(2 + RANKS) as machines,
        cluster_on(machines, Path(folder), start=launcher == "cluster") as cluster,
    ):
        yield cluster


def hurt(cluster: Cluster, case: Case, activities: Sequence[str], times: int) -> list[Result]:
    """Inject a fault into runs whose ranks perform the activities in turn."""
    with contextlib.closing(Series(cluster, case)) as series:
        return [series.hurt(activities[turn % len(activities)]) for turn in range(times)]


HEAD = (
    "launcher | start | fault | runs | processes left | files | ports | shared memory | "
    "wrong causes | median | worst"
)


def line_of(case: Case, results: Sequence[Result]) -> str:
    """Return a line of the table."""
    seconds = [result.seconds for result in results if result.seconds is not None]
    left = [sum(kind) for kind in list(zip(*results, strict=True))[2:]]
    wrong = sum(not result.right for result in results)
    times = [f"{of(seconds):.2f} s" if seconds else "-" for of in (statistics.median, max)]
    return " | ".join(map(str, [*case, len(results), *left, wrong, *times]))


def side_by_side(lines: Iterable[str]) -> str:
    """Return a Markdown table from the lines that `line_of` returns; others are skipped."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for line in lines:
        launcher, start, fault, *found = line.strip().split(" | ")
        if launcher in FAULTS and len(found) == len(HEAD.split(" | ")) - len(Case._fields):
            cells.setdefault((launcher, fault), {})[start] = _cell(*found)
    rows = [["launcher", "fault", *STARTS], ["---"] * (2 + len(STARTS))]
    rows += [[*key, *(found.get(start, "") for start in STARTS)] for key, found in cells.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(runs: str, processes: str, *found: str) -> str:
    *others, wrong, median, worst = found
    things = sum(map(int, others))
    text = f"{runs}: " + (f"{median}, {worst} at most" if median != "-" else "no report")
    text += f", {processes} + {things} left" if int(processes) or things else ""
    return text + (f", {wrong} wrong" if int(wrong) else "")


def main() -> int:
    """Run the faults that the command line selects; return 1 if one of our runs left anything or
    reported a wrong cause.
    """
    parser = argparse.ArgumentParser("chaos", description=__doc__)
    parser.add_argument("--times", type=int, default=10, help="runs for each line of the table")
    for name, choices in [("launchers", FAULTS), ("starts", STARTS), ("activities", ACTIVITIES)]:
        parser.add_argument(f"--{name}", nargs="+", choices=choices, default=list(choices))
    parser.add_argument("--faults", nargs="+", help="only these: 'a rank is killed'")
    wanted = parser.parse_args()
    spotless, lines = True, []
    print(HEAD, flush=True)
    for launcher, start in itertools.product(wanted.launchers, wanted.starts):
        cases = [Case(launcher, start, fault) for fault in wanted.faults or FAULTS[launcher]]
        with bed(launcher, apart=start != "pyspark") as cluster:
            for case in cases:
                if case.fault not in FAULTS[launcher] or not case.is_possible:
                    continue
                try:
                    results = hurt(cluster, case, wanted.activities, wanted.times)
                except RuntimeError as error:  # its ranks did not start
                    print(f"{' | '.join(case)} | {error}", flush=True)
                    spotless &= start == "pyspark"
                    continue
                lines.append(line_of(case, results))
                print(lines[-1], flush=True)
                spotless &= start == "pyspark" or all(result.spotless for result in results)
    print(f"\n{side_by_side(lines)}")
    return int(not spotless)


if __name__ == "__main__":
    sys.exit(main())
