"""A training of two ranks on two machines, for tests that kill, stop or partition them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil

from distributor.wire.protocol import DRIVER_LEASE_SECONDS, NODE_LEASE_SECONDS
from support.cluster import Cluster, Driver
from support.waiting import DEADLINE, comes_true, until

NOTICED = NODE_LEASE_SECONDS + 5.0
"""Seconds within which the driver gives up a node whose heartbeats do not arrive, on busy cores."""
STOPS_ITSELF = DRIVER_LEASE_SECONDS + 15.0
"""Seconds within which a node that cannot reach the driver stops its ranks."""


TRAINING = """
def train(folder):
    import json, os, pathlib, subprocess, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    # A child that outlives its rank unless the run kills it.
    session = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    note = pathlib.Path(folder, os.environ["RANK"])
    note.with_suffix(".part").write_text(json.dumps([os.getpid(), session.pid]))
    note.with_suffix(".part").rename(note.with_suffix(".json"))
    while not pathlib.Path(folder, "enough").exists():
        time.sleep(0.01)
    folders = [None] * dist.get_world_size()
    dist.all_gather_object(folders, folder)
    return folders

def ordinary_job(folder):
    def wait(_):
        import pathlib, time
        pathlib.Path(folder, "begun").touch()
        while not pathlib.Path(folder, "enough").exists():
            time.sleep(0.01)
        return "done"
    send(job=spark.sparkContext.parallelize([0], 1).map(wait).collect())

def run_commands():
    for line in _channel.makefile():
        threading.Thread(target=exec, args=[json.loads(line), globals()], daemon=True).start()

threading.Thread(target=run_commands, daemon=True).start()
spark.sparkContext.setJobGroup("of this test", "")
try:
    runner = TorchDistributor(2, local_mode=False, use_gpu=False{settings})
    send(value=runner.run(train, {folder!r}))
except BaseException as error:
    send(error=type(error).__name__, message=str(error), notes=getattr(error, "__notes__", []))
time.sleep(1000)
"""


class Training:
    """Two ranks on two machines that train until `let_end`.

    Attributes
    ----------
    started : list of Process
        After `await_ranks`, the ranks and the child that each has started in its own session.
    """

    def __init__(self, cluster: Cluster, folder: Path, settings: str = "", **conf: Any) -> None:
        self._cluster = cluster
        self._folder = folder
        self._conf = conf
        folder.mkdir()
        self._source = TRAINING.format(folder=str(folder), settings=settings)
        self.started: list[psutil.Process] = []

    def start(self) -> Driver:
        conf = {"spark.cores.max": "2", **self._conf}
        self.driver = self._cluster.driver(self._source, **conf)
        return self.driver

    def await_ranks(self) -> list[psutil.Process]:
        """Return the ranks, by number, once both are connected."""
        notes = [self._folder / f"{rank}.json" for rank in range(2)]
        connected = comes_true(lambda: all(note.exists() for note in notes), DEADLINE)
        assert connected, self.driver.log.read_text()[-8000:]
        found = [map(psutil.Process, json.loads(note.read_text())) for note in notes]
        ranks, sessions = zip(*found, strict=True)
        self.started = [*ranks, *sessions]
        assert len({address_of(rank) for rank in ranks}) == 2, "both ranks are on one machine"
        return list(ranks)

    def await_ordinary_job(self) -> None:
        """Start an ordinary job in the same session, and wait until it runs beside the ranks."""
        self.driver.send(f"ordinary_job({str(self._folder)!r})")
        until((self._folder / "begun").exists, "the ordinary job has begun", DEADLINE)

    def let_end(self) -> None:
        (self._folder / "enough").touch()


def agent_of(cluster: Cluster, rank: psutil.Process) -> psutil.Process:
    address = address_of(rank)
    [machine] = [machine for machine in cluster.on_workers if machine.address == address]
    return cluster.find("agent", machine)[0]


def address_of(process: psutil.Process) -> str:
    return str(process.environ()["SPARK_LOCAL_IP"])
