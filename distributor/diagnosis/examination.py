"""The Spark job that examines all executors, and what it needs: slots, and a port of the driver."""

from __future__ import annotations

import contextlib
import pickle
import queue
import time
import uuid
from collections.abc import Iterator
from typing import Any

from distributor.core.text import counted
from distributor.diagnosis.comparison import HUB_FIX
from distributor.diagnosis.executor import ExaminationSpec, ExaminedExecutor
from distributor.diagnosis.probe import ProbeServer
from distributor.diagnosis.report import EXECUTORS, Check, failure, not_checked, ok
from distributor.diagnosis.settings import Wanted
from distributor.errors import DistributorError
from distributor.launch.call_site import CallSite
from distributor.launch.cancellation import Cancellation
from distributor.launch.spark.capacity.executors import Executors
from distributor.launch.spark.capacity.slot_shortage import why_few_slots
from distributor.launch.spark.capacity.slots import Slots
from distributor.launch.spark.error_translation import explain, more_slots
from distributor.launch.spark.hub_address import choose_hub_address
from distributor.launch.spark.log_quieting import quiet
from distributor.launch.spark.package_shipping import barrier_frame
from distributor.launch.spark.plan import ClusterPlan
from distributor.launch.spark.polling import poll_until
from distributor.launch.spark.session import Session
from distributor.launch.spark.spark_job import SparkJob

TASK = "distributor.diagnosis.executor:run"
"""The function that each task runs."""
SLOT_SECONDS = 15.0
"""Seconds for executors to register."""
STEADY_SECONDS = 1.5
"""Seconds without a further slot after which no other executor is expected."""
START_SECONDS, JOB_SECONDS = 20.0, 60.0
"""Seconds for the job's tasks to start, and then for all of them to end."""


def await_slots(session: Session, plan: ClusterPlan) -> tuple[int, Check]:
    """Wait for executors, and return how many slots there are for tasks of the plan, and a check.

    Through Connect nobody knows them.
    """
    name, executors, profile = "slots", Executors(session), Slots(session, plan).profile
    if session.is_connect:
        why = "through Spark Connect nobody knows the slots"
        return plan.num_tasks, not_checked(name, why, EXECUTORS)
    most = executors.max_slots()
    enough = plan.num_tasks if most is None else min(plan.num_tasks, most)
    steady = _Steady()

    def too_few() -> int | None:
        slots = executors.slots(profile) or 0
        complete = slots >= most if most is not None else False
        return None if complete or (slots >= enough and steady.is_steady(slots)) else slots

    poll_until(too_few, time.monotonic() + SLOT_SECONDS, Cancellation())
    slots = executors.slots(profile) or 0
    if slots < plan.num_tasks:
        return slots, failure(
            name, why_few_slots(session, plan, slots), more_slots(session.master), EXECUTORS
        )
    found = f"{counted(slots, 'slot')} for {counted(plan.num_tasks, 'task')}"
    return slots, ok(name, found, EXECUTORS)


class _Steady:
    """Notices that a number has not changed for `STEADY_SECONDS`."""

    def __init__(self) -> None:
        self._number = -1
        self._since = 0.0

    def is_steady(self, number: int) -> bool:
        now = time.monotonic()
        if number != self._number:
            self._number, self._since = number, now
        return now - self._since > STEADY_SECONDS


@contextlib.contextmanager
def driver_server(
    session: Session, wanted: Wanted, token: bytes
) -> Iterator[tuple[tuple[str, int] | None, list[Check]]]:
    """Listen where the hub of a run would listen."""
    address = choose_hub_address(session, wanted.hub_address, wanted.hub_port)
    try:
        ports = range(address.port, address.port + 1)
        server = ProbeServer(address.bound, token, ports)
    except OSError as error:
        found = f"The driver cannot listen at {address.bound}, port {address.port}: {error}."
        yield None, [failure("network to the driver", found, HUB_FIX)]
        return
    with server:
        yield (address.advertised, server.port), []


def run_job(session: Session, plan: ClusterPlan, spec: ExaminationSpec) -> list[ExaminedExecutor]:
    """Run the job on all slots of a plan, and return what it found on each executor.

    Raises
    ------
    DistributorError
        If Spark cannot run it, or it does not end in time.
    """
    endings: queue.Queue[Any] = queue.Queue()
    try:
        rows = session.spark.range(0, plan.num_tasks, 1, plan.num_tasks)
        profile = Slots(session, plan).profile
        frame = barrier_frame(session, rows, TASK, spec, "executor binary", profile)
    except Exception as error:  # of the JVM, a Connect server or a full disk
        raise explain(error, plan.num_tasks) from error
    with (
        quiet(session),
        SparkJob(
            session,
            frame,
            f"distributor-doctor-{uuid.uuid4().hex}",
            endings.put,
            description="distributor doctor",
            call_site=CallSite.of_caller("doctor"),
        ) as job,
    ):
        ending = _await_end(job, endings, Slots(session, plan))
    if isinstance(ending, BaseException):
        raise explain(ending, plan.num_tasks) from ending
    return [pickle.loads(bytes(row[0])) for row in ending]


def _await_end(job: SparkJob, endings: queue.Queue[Any], slots: Slots) -> Any:
    """Wait for the rows or the exception of the job; cancel it if it takes too long."""
    try:
        return endings.get(timeout=START_SECONDS)
    except queue.Empty:
        if job.has_begun() is False:
            why = slots.why_not_started(job.other_running_tasks())
            job.cancel()
            tasks = counted(slots.plan.num_tasks, "barrier task")
            raise DistributorError(
                f"Spark started none of {tasks} within {START_SECONDS:g} s. {why}"
            ) from None
    try:
        return endings.get(timeout=JOB_SECONDS)
    except queue.Empty:
        job.cancel()
        raise DistributorError(
            f"The executors did not finish their checks within {START_SECONDS + JOB_SECONDS:g} s."
        ) from None
