"""Runs whose nodes are the tasks of an ordinary job of Spark, as with dynamic allocation."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import cloudpickle
import psutil
import pytest
from support.hubs import SECRET, link
from support.ranks import my_rank
from support.waiting import until

from distributor import NodeLost, TorchDistributor
from distributor._compat import pyspark as private
from distributor._compat.pyspark import jobs_with_tag
from distributor.control.run import NodeEnded
from distributor.control.waiting import Cancellation
from distributor.launchers.spark import executors
from distributor.launchers.spark.gang import Gang
from distributor.wire.hub import Hub
from distributor.wire.messages import Assignment, AssignmentEnded, Dismissal, MemberUp
from distributor.wire.tcp_link import Link

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SOON = 30.0


def ranks(number: int | tuple[int, int] = 4, **settings: Any) -> TorchDistributor:
    settings = {"timeout": 120, "barrier": False, **settings}
    return TorchDistributor(number, local_mode=False, use_gpu=False, **settings)


def reduce(large: bytes = b"") -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + 1 + len(large))
    dist.all_reduce(total)
    return {"total": int(total), "rank": dist.get_rank(), "executor": os.getcwd()}


@pytest.mark.spark
def test_ranks_are_numbered_by_executor_and_return_values(spark: Any) -> None:
    large = bytes(2**20)
    found = ranks().run_all(reduce, large)
    assert [each["rank"] for each in found] == [0, 1, 2, 3]
    assert {each["total"] for each in found} == {10 + 4 * len(large)}
    assert Counter(each["executor"] for each in found).most_common() == [
        (found[0]["executor"], 2),
        (found[3]["executor"], 2),
    ]


def node_of_rank() -> psutil.Process:
    """Return the task that is this rank's node, by its title and executor."""
    title = f"node {os.environ['GROUP_RANK']} "
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if title in " ".join(each.cmdline()) and each.cwd() == os.getcwd():
                return each
    raise AssertionError(f"there is no process with {title!r} in its title")


def note_process_and_fail(folder: Path, how: str) -> str:
    """Note this rank's node; fail in the first attempt."""
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    tag, agent = os.environ["TORCHELASTIC_RUN_ID"], node_of_rank()
    (folder / f"{attempt}-{my_rank()}").write_text(f"{tag} {agent.pid}")
    if attempt == "0" and my_rank() == 1:
        until(lambda: (folder / "0-0").exists(), "the other rank has noted its process", SOON)
        if how == "raises":
            raise KeyError("in the first attempt")
        if how == "loses its node":
            agent.kill()
    if attempt == "0":
        threading.Event().wait()
    return attempt


@pytest.mark.spark
@pytest.mark.parametrize("how", ["raises", "loses its node"])
def test_attempts_share_a_job_that_does_not_fail(spark: Any, tmp_path: Path, how: str) -> None:
    assert ranks(2, max_failures=1).run_all(note_process_and_fail, tmp_path, how) == ["1", "1"]

    notes = {path.name: path.read_text().split() for path in tmp_path.iterdir()}
    assert notes["0-0"][1] in {notes["1-0"][1], notes["1-1"][1]}, "that node lives"
    [job] = jobs_with_tag(spark.sparkContext, notes["0-0"][0])
    tracker = spark.sparkContext.statusTracker()
    assert tracker.getJobInfo(job).status == "SUCCEEDED"
    stages = [tracker.getStageInfo(stage) for stage in tracker.getJobInfo(job).stageIds]
    assert sum(stage.numFailedTasks for stage in stages) == (how == "loses its node")


@pytest.mark.spark
def test_a_lost_node_is_the_error_of_a_run_without_a_further_attempt(
    spark: Any, tmp_path: Path
) -> None:
    with pytest.raises(NodeLost, match="Python worker exited unexpectedly"):
        ranks(2).run(note_process_and_fail, tmp_path, "loses its node")


def save(folder: str) -> None:
    Path(f"{folder}.pt").write_bytes(bytes(3000))
    Path(folder).mkdir()


@pytest.mark.spark
def test_files_that_go_with_an_executor_are_named(
    spark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks(1).run(save, "saved")
    error = capsys.readouterr().err
    named = r"\[0\] distributor: saved \(.*\), saved.pt \(3 kB\) in .* will be removed with"
    assert re.search(named, error), error


@pytest.mark.spark
def test_a_cancelled_run_leaves_no_task(spark: Any, tmp_path: Path) -> None:
    future = ranks(2).submit(note_process_and_fail, tmp_path, "waits")
    until(lambda: len(list(tmp_path.glob("0-*"))) == 2, "both ranks work", SOON)
    assert future.cancel()
    tracker = spark.sparkContext.statusTracker()
    until(lambda: not tracker.getActiveJobsIds(), "no job is active", SOON)


class Job:
    """Stands for the job of Spark whose tasks the test plays."""

    def __init__(self, on_end: Any) -> None:
        self.on_end = on_end
        self.failure = "ExecutorLostFailure (executor 1 exited caused by one of the running tasks)"
        self.is_cancelled = False

    def __enter__(self) -> Job:
        return self

    def end(self, seconds: float = 0.0) -> None: ...

    def cancel(self) -> None:
        self.is_cancelled = True
        self.on_end(RuntimeError("cancelled"))

    def failure_of(self, task: int) -> str:
        return self.failure


class Tasks:
    """A gang, and links that play its tasks."""

    def __init__(self, hub: Hub) -> None:
        self.jobs: list[Job] = []
        self.sizes: list[int] = []
        self.received: dict[int, list[Any]] = {}
        self.posted: list[Any] = []
        self._port = hub.port
        self._links: dict[int, Link] = {}
        self.gang = Gang(hub, self._submit, "a run")

    def _submit(self, number: int, size: int, rows: Any, on_end: Any) -> Any:
        self.sizes.append(size)
        self.jobs.append(Job(on_end))
        return self.jobs[-1]

    def come(self, task: int, partition: int, executor: str = "host:1") -> None:
        self.received[task] = []
        self._links[task] = link(self._port, task, self.received[task].append)
        self._links[task].send(MemberUp(len(self.jobs) - 1, partition, executor))

    def send(self, task: int, message: object) -> None:
        self._links[task].send(message)

    def go(self, task: int) -> None:
        self._links.pop(task).close()

    def gather(self, least: int = 2, most: int = 2) -> list[int]:
        members = self.gang.gather(least, most, threading.TIMEOUT_MAX, Cancellation())
        return [member.number for member in members]

    def await_members(self, *numbers: int) -> None:
        def are_there() -> bool:
            return [member.number for member in self.gang.members] == [*numbers]

        until(are_there, f"the members are {numbers}", SOON)

    def assign(self, numbers: list[int]) -> None:
        members = [each for each in self.gang.members if each.number in numbers]
        executors = {node: member.executor for node, member in enumerate(members)}
        spec: Any = "what to do"
        self.gang.assign(dict(enumerate(members)), executors, spec, self.posted.append)

    def await_message(self, task: int, kind: type) -> Any:
        until(lambda: any(isinstance(m, kind) for m in self.received[task]), f"{kind}", SOON)
        return next(m for m in self.received[task] if isinstance(m, kind))


@pytest.fixture
def tasks() -> Iterator[Tasks]:
    with Hub("127.0.0.1", SECRET) as hub:
        tasks = Tasks(hub)
        with tasks.gang as gang:
            gang.require_jobs(2)
            yield tasks


def test_a_second_task_for_a_partition_waits_until_the_first_has_gone(tasks: Tasks) -> None:
    tasks.come(10, 0)
    tasks.await_members(10)
    tasks.come(11, 0)  # a speculative copy
    tasks.come(12, 1)
    assert tasks.gather() == [10, 12]

    tasks.assign([10, 12])
    assert tasks.await_message(12, Assignment).nodes == {10: 0, 12: 1}
    tasks.go(10)
    until(lambda: len(tasks.posted) == 1, "the loss is reported", SOON)
    assert isinstance(tasks.posted[0], NodeEnded)
    assert isinstance(tasks.posted[0].error, NodeLost)
    assert "executor 1 exited" in str(tasks.posted[0].explain(tasks.posted[0].error, "rank 0"))
    assert tasks.gather() == [11, 12]
    assert not any(isinstance(message, Dismissal) for message in tasks.received[11])


def test_tasks_that_leave_are_replaced_by_a_further_job(tasks: Tasks) -> None:
    tasks.come(10, 0, "host:1")
    tasks.come(12, 1, "host:2")
    assert tasks.gather() == [10, 12]
    tasks.gang.leave(["2"])
    tasks.await_message(12, Dismissal)
    tasks.gang.require_jobs(2)
    assert tasks.sizes == [2, 1]
    tasks.come(13, 0, "host:3")
    assert tasks.gather() == [10, 13]
    tasks.jobs[0].failure = ""  # the task lives, or has ended: Spark does not start it again
    tasks.go(10)
    tasks.await_members(13)
    until(lambda: tasks.gang.require_jobs(2) or len(tasks.jobs) == 3, "a third job", SOON)
    tasks.jobs[1].on_end([])  # its task has lost its link
    tasks.gang.require_jobs(2)
    assert tasks.sizes == [2, 1, 1, 1]


def test_the_end_of_an_earlier_attempt_is_not_that_of_the_next(tasks: Tasks) -> None:
    tasks.come(10, 0)
    tasks.come(12, 1)
    tasks.assign(tasks.gather())
    tasks.assign(tasks.gather())
    for task in (10, 12):
        tasks.send(task, AssignmentEnded(1))
        tasks.go(task)  # which is noted after that
    assert tasks.gang.await_end(SOON)
    assert [type(ended.error) for ended in tasks.posted] == [NodeLost, NodeLost]


def test_notices_that_spark_cannot_give_are_missed_once_and_not_silently(
    monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(private, "executor_ids", {}.__getitem__)
    monkeypatch.setattr(executors, "end_of", lambda spark: None)
    session = Mock(is_connect=False, is_local_master=False)
    assert [executors.Executors(session).leaving(None) for _ in range(3)] == [{}] * 3
    [warning] = warned()
    assert "is about to end, so that ranks are not notified of it (KeyError)" in warning
