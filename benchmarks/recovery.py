"""Time from a kill to the first collective of the next attempt, with the checkpoint loaded.

A host that is cut off is only reported: the next attempt waits until Spark, by its own timeouts,
has removed the host's executors.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import spark
from benchmarks.functions import MEGABYTE, weights
from benchmarks.hosts import seconds_until_reported
from benchmarks.launchers import Run, ray_cluster
from benchmarks.measure import Driven, apart
from benchmarks.packages import library
from benchmarks.peers import Peer
from benchmarks.report import Row, gathered, row
from benchmarks.spark import EMBEDDED, LOCAL
from benchmarks.turns import Effort, measured
from distributor.core.versions import DISTRIBUTION
from distributor.rank.context import worker_context

RANKS, IN_PLACE_RANKS = 2, 3
ONE_CORE = "local-cluster[2,1,1024]"
"""A cluster on which the ranks need both executors."""
TWO_HOSTS = "spark://, two hosts"
THREE_EXECUTORS = "local-cluster[3,1,1024]"
RANK, EXECUTOR, HOST = "a rank is killed", "an executor is killed", "a host is cut off"
ROW_BYTES, STEP_SECONDS = 4096, 0.01
SIZES = (1, 1000)
"""Megabytes of the checkpoint, or of the model."""
RECOVERED = "until the first collective of the next attempt"
STEPPED = "until the others have done a step"
FORMED = "until the others have formed a group, less the rest of their own backward pass"
REPORTED = "until it is reported"
HOST_REPEATS = 3
REPEATS = 4
"""Runs of one driver. The first is not counted: it also starts warm processes."""
DEADLINE = 900.0
WAIT_SECONDS = 120.0
SETTLE_SECONDS = 6.0
"""Seconds between the report and the kill, in which a launcher may do more in the background."""


class Case(NamedTuple):
    """A launcher, a place, what is killed, and the megabytes of the checkpoint."""

    peer: Peer
    place: str
    fault: str
    megabytes: int

    @property
    def title(self) -> str:
        if self.fault == HOST:
            return f"{self.place}, {self.fault}"
        return titled(self.place, self.fault, self.megabytes)


def titled(place: str, fault: str, megabytes: int) -> str:
    """Return the title of a case."""
    return f"{place}, {fault}, a checkpoint of {megabytes:,} MB"


def measure(effort: Effort) -> list[Row]:
    """Measure recoveries."""
    sizes = SIZES[:1] if effort.quick else SIZES
    places = [
        ("ours", LOCAL, RANK),
        ("ray", LOCAL, RANK),
        ("ours_in_place", LOCAL, RANK),
        ("ours", EMBEDDED, RANK),
        ("ours", ONE_CORE, EXECUTOR),
        ("ours_ordinary", ONE_CORE, EXECUTOR),
        ("ours_pair", ONE_CORE, EXECUTOR),
        ("ours_in_place", THREE_EXECUTORS, EXECUTOR),
    ]
    cases = [
        Case(PEERS[name], place, fault, megabytes)
        for name, place, fault in places
        for megabytes in sizes
    ]
    cases += [Case(PEERS[name], ONE_CORE, EXECUTOR, sizes[0]) for name in FLOORS]
    cases.append(Case(PEERS["ours"], TWO_HOSTS, HOST, 0))
    wanted = [c for c in cases if not effort.families or c.peer.family in effort.families]
    return measured(wanted, effort.few_rounds, _drive, _rows)


def drive(peer: str, place: str, fault: str, size: int) -> dict[str, Any]:
    """Run a training several times in which a process is killed once, and which then goes on."""
    if fault == HOST:
        return {"seconds": seconds_until_reported(HOST_REPEATS)}
    with PEERS[peer].open(place) as opened:
        if peer in FLOORS:
            return {"seconds": [FLOORS[peer](opened) for _ in range(REPEATS)][1:]}
        found = [_recovery(opened, fault, size, _ranks(peer)) for _ in range(REPEATS)][1:]
    return {name: [each[name] for each in found] for name in found[0]}


def train(config: dict[str, Any]) -> None:
    """Report a checkpoint and wait to be killed; in the next attempt, load it and reduce once."""
    import torch

    api = library(config["api"])
    folder, rank = Path(config["folder"]), api.get_context().get_world_rank()
    checkpoint = api.get_checkpoint()
    if checkpoint is None:
        with tempfile.TemporaryDirectory() as local:
            if rank == 0:
                torch.save(weights(config["size"]), Path(local, "weights.pt"))
                checkpoint = api.Checkpoint.from_directory(local)
            api.report({"step": 1}, checkpoint=checkpoint)
        _wait_for_kill(folder, rank)
    else:
        with checkpoint.as_directory() as local:
            torch.load(Path(local, "weights.pt"))
        _note_recovery(folder, rank)


def _wait_for_kill(folder: Path, rank: int) -> None:
    """Wait in a collective on rank 0, and outside of it on the others."""
    import torch.distributed as dist

    (folder / f"pid{rank}").write_text(str(os.getpid()))
    if rank != 0:
        signal.pause()
    dist.barrier()


def train_in_place(config: dict[str, Any]) -> None:
    """Train until a rank is killed, and for one step with the others."""
    import torch
    import torch.distributed as dist

    folder, rank = Path(config["folder"]), int(os.environ["RANK"])
    api = library("distributor.train.torch")

    class Noted(api.State):  # type: ignore[name-defined, misc]
        def on_members(self, rank: int, size: int) -> None:
            if size < IN_PLACE_RANKS and not is_new:
                moments = self.reduce, self.notify, self.backward, time.time()
                (folder / f"formed{os.getpid()}").write_text(" ".join(map(str, moments)))

    membership: Any = worker_context().membership
    state, is_new = Noted(reduce=0.0, notify=0.0, backward=0.0), membership.joins  # their ends

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            value = function(*arguments)
            setattr(state, function.__name__, time.time())
            return value

        return call

    membership.reduce, membership.notify = noted(membership.reduce), noted(membership.notify)
    layer = torch.nn.Linear(ROW_BYTES // 4, config["size"] // ROW_BYTES, bias=False)
    model = api.prepare_model(layer)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)  # counts completed steps
    is_complete, completed = True, 0
    while is_complete or schedule.last_epoch == completed:
        completed = schedule.last_epoch
        optimizer.zero_grad()
        noted(model(torch.ones(1, ROW_BYTES // 4)).sum().backward)()
        optimizer.step()
        schedule.step()
        time.sleep(STEP_SECONDS)  # as if a GPU computed: the ranks do not compete for cores
        is_complete = is_complete and dist.get_world_size() == IN_PLACE_RANKS
        if schedule.last_epoch == 2:
            (folder / f"pid{rank}").write_text(str(os.getpid()))
    if not is_new:
        (folder / f"recovered{rank}").write_text(str(time.time()))


def _note_recovery(folder: Path, rank: int) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))
    (folder / f"recovered{rank}").write_text(str(time.time()))


@contextlib.contextmanager
def _ours(place: str, ranks: int | tuple[int, int] = RANKS, **settings: Any) -> Iterator[Run]:
    config = {"settings": settings} if settings else {}
    with spark.session(place):
        yield _fit_of("distributor.train", ranks, config, local_mode=place == LOCAL)


def _ours_ordinary(place: str) -> AbstractContextManager[Run]:
    return _ours(place, barrier=False)


def _ours_pair(place: str) -> AbstractContextManager[Run]:
    return _ours(place, (1, RANKS), barrier=False)


@contextlib.contextmanager
def _ours_in_place(place: str) -> Iterator[Run]:
    from distributor import TorchDistributor

    with spark.session(place):
        distributor = TorchDistributor(
            IN_PLACE_RANKS,
            local_mode=place == LOCAL,
            use_gpu=False,
            recovery="in_place",
            max_failures=1,
        )
        yield lambda config, storage: distributor.run(train_in_place, config)


@contextlib.contextmanager
def _ray(place: str) -> Iterator[Run]:
    with ray_cluster(RANKS):
        yield _fit_of("ray.train", RANKS, {})


def _fit_of(name: str, ranks: int | tuple[int, int], config: dict[str, Any], **scaling: Any) -> Run:
    """Return a function that trains with Ray Train, or this project in its place."""
    api, trainer = library(name), library(f"{name}.torch").TorchTrainer
    return lambda loop_config, storage: trainer(
        train,
        train_loop_config={"api": name, **loop_config},
        scaling_config=api.ScalingConfig(num_workers=ranks, **scaling),
        run_config=api.RunConfig(
            storage_path=str(storage), failure_config=api.FailureConfig(max_failures=1), **config
        ),
    ).fit()


PEERS = {
    peer.name: peer
    for peer in (
        Peer("ours", "distributor", _ours, DISTRIBUTION),
        Peer("ray", "Ray Train", _ray, "ray"),
        Peer("ours_ordinary", "distributor, barrier=False", _ours_ordinary, DISTRIBUTION),
        Peer(
            "ours_pair",
            "distributor, barrier=False, num_workers=(1, 2)",
            _ours_pair,
            DISTRIBUTION,
            note="the next attempt has one rank",
        ),
        Peer(
            "ours_in_place",
            'distributor, recovery="in_place"',
            _ours_in_place,
            DISTRIBUTION,
            note="three ranks, of which two go on; no checkpoint",
        ),
        Peer(
            "floor_executor",
            "floor: Spark's own start of an executor",
            spark.session,
            "pyspark",
            note="until an empty barrier stage has run on both executors",
        ),
        Peer(
            "floor_task",
            "floor: Spark's own restart of a task that imports torch",
            spark.session,
            "pyspark",
            note="on the executor that replaces the killed one",
        ),
    )
}


def _ranks(peer: str) -> int:
    return IN_PLACE_RANKS if peer == "ours_in_place" else RANKS


def _recovery(fit: Run, fault: str, size: int, ranks: int) -> dict[str, float]:
    """Run a training with a fault; return the seconds from the kill until the ranks work again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        killed: list[float] = []
        killer = threading.Thread(
            target=lambda: killed.append(_kill(folder, fault, ranks)), daemon=True
        )
        killer.start()
        fit({"folder": name, "size": size}, folder / "storage")
        killer.join()
        recovered = [float(file.read_text()) for file in folder.glob("recovered*")]
        formed = [tuple(map(float, file.read_text().split())) for file in folder.glob("formed*")]
    found = {"seconds": max(recovered) - killed[0]}
    if formed:
        found["formed"] = _seconds_of_forming(killed[0], formed)
    return found


def _seconds_of_forming(killed: float, formed: list[tuple[float, ...]]) -> float:
    """Return the seconds of a new group, less those in which the last rank still computed.

    For each rank, there are the moments at which it handed over its last gradients, had the notice
    of the loss, had ended its backward pass, and was in the group. What it does between the notice
    and the end of the pass, as to copy gradients out of buckets, belongs to any backward pass.
    """
    handed_over, notified, ended, _ = max(formed, key=lambda moments: moments[2])
    waited = max(0.0, notified - max(killed, handed_over))
    return waited + max(at for *_, at in formed) - max(killed, ended)


def _kill(folder: Path, fault: str, ranks: int) -> float:
    """Kill the rank, or an executor, once the ranks wait for it; return when that was."""
    files = [folder / f"pid{rank}" for rank in range(ranks)]
    _wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    time.sleep(SETTLE_SECONDS)
    pid = _executors()[0] if fault == EXECUTOR else int(files[-1].read_text())
    now = time.time()
    os.kill(pid, signal.SIGKILL)
    return now


def _restart_of_executor(session: Any) -> float:
    def registered() -> set[str]:
        scheduler = session.sparkContext._jsc.sc().schedulerBackend()
        return set(scheduler.getExecutorIds().mkString(" ").split())

    before, began = registered(), time.time()
    os.kill(_executors()[0], signal.SIGKILL)
    # Spark looks only each 15 s whether a barrier stage that was submitted before has room.
    _wait_until(lambda: len(registered()) == RANKS and registered() != before)
    spark.empty_stage(session, RANKS)
    return time.time() - began


def _restart_of_task(session: Any) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def task(batches: Iterator[Any]) -> Iterator[Any]:
            import torch.distributed  # noqa: F401
            from pyspark import TaskContext

            context: Any = TaskContext.get()
            for _ in batches:
                pass
            (folder / f"{context.partitionId()}-{context.attemptNumber()}").touch()
            while not (folder / "enough").exists():
                time.sleep(0.005)
            yield from ()

        frame = session.range(0, RANKS, 1, RANKS).mapInArrow(task, "nothing int")
        job = threading.Thread(target=frame.collect)
        job.start()
        _wait_until(lambda: len(list(folder.glob("*-0"))) == RANKS)
        time.sleep(SETTLE_SECONDS)
        began = time.time()
        os.kill(_executors()[0], signal.SIGKILL)
        _wait_until(lambda: bool(list(folder.glob("*-1"))))
        seconds = time.time() - began
        (folder / "enough").touch()
        job.join()
    return seconds


FLOORS = {"floor_executor": _restart_of_executor, "floor_task": _restart_of_task}


def _executors() -> list[int]:
    """Return the processes of the executors, without dead ones that are not reaped yet."""
    psutil = library("psutil")
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            is_executor = "CoarseGrainedExecutorBackend" in str(process.cmdline())
            if is_executor and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the ranks did not reach the place of the fault")
        time.sleep(0.005)


def _drive(case: Case) -> Driven:
    return apart(
        drive,
        DEADLINE,
        peer=case.peer.name,
        place=case.place,
        fault=case.fault,
        size=case.megabytes * MEGABYTE,
    )


def _rows(case: Case, measurements: list[Driven]) -> list[Row]:
    what = REPORTED if case.fault == HOST else RECOVERED
    if case.peer.name != "ours_in_place":
        return [row(case.peer, case.title, what, gathered(measurements, "seconds"))]
    return [
        row(case.peer, case.title, name, gathered(measurements, key))
        for key, name in (("seconds", STEPPED), ("formed", FORMED))
    ]
