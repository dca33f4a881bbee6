"""Examines this machine alone, or a cluster whose Spark application may have to be started.

On a cluster, one Spark job examines all executors and the network between them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import secrets
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from distributor.control.cancellation import Cancellation
from distributor.control.polling import poll_until
from distributor.core.addresses import port_range
from distributor.core.resources import format_bytes, spark_local_dirs
from distributor.core.spelling import Spelling
from distributor.core.text import counted
from distributor.diagnosis.configuration import configuration_checks, make_plan
from distributor.diagnosis.exchange import Exchange
from distributor.diagnosis.executor import ExaminationSpec, ExaminedExecutor
from distributor.diagnosis.machine import (
    Machine,
    Needs,
    checks_of,
    differences,
    examine,
)
from distributor.diagnosis.network import HUB_FIX, TOKEN_SIZE, ProbeServer, network_checks
from distributor.diagnosis.peers import ARRIVAL_SECONDS
from distributor.diagnosis.report import (
    EXECUTORS,
    HERE,
    Check,
    Report,
    Status,
    failure,
    hosts_text,
    merged,
    not_checked,
    ok,
    warning,
)
from distributor.diagnosis.services import SERVICES, check_tracking, shared_marker, tracking_uri
from distributor.diagnosis.settings import Wanted
from distributor.errors import DistributorError
from distributor.launchers.spark.capacity.executors import Executors
from distributor.launchers.spark.capacity.slot_shortage import why_few_slots, why_no_more
from distributor.launchers.spark.capacity.slots import Slots
from distributor.launchers.spark.hub_address import choose_hub_address
from distributor.screen.messages import shown_from
from distributor.spark.call_site import CallSite
from distributor.spark.error_translation import explain, more_slots
from distributor.spark.java import min_java
from distributor.spark.log_quieting import quiet
from distributor.spark.package_shipping import task_frame
from distributor.spark.plan import ClusterPlan
from distributor.spark.session import Session
from distributor.spark.spark_job import SparkJob
from distributor.torch_distributor import TorchDistributor

LOCAL_RANKS = 2
"""Ranks of the all-reduce on this machine if the user names no number."""
START_FIX = (
    "Correct what the message names. The master and Spark's configuration decide how Spark starts."
)
ON_EXECUTORS = ("executors", "versions", "network to the driver", "network between executors")
"""Checks that need a job of Spark."""
MAX_TEXT = 2000
"""Characters of an error of Spark that are shown."""
TASK = "distributor.diagnosis.executor:run"
"""The function that each task runs."""
SLOT_SECONDS = 15.0
"""Seconds for executors to register."""
STEADY_SECONDS = 1.5
"""Seconds without a further slot after which no other executor is expected."""
START_SECONDS, JOB_SECONDS = 20.0, 60.0
"""Seconds for the job's tasks to start, and then for all of them to end."""
FIRST_SECONDS, ORDINARY_JOB_SECONDS = 60.0, 100.0
"""The same for an ordinary job, for which Spark may have to ask for executors."""
ALL_REDUCE = "all-reduce"
REDUCED_BYTES = 16 * 2**20
"""Bytes that the ranks reduce."""
REDUCTIONS = 3
RUN_SECONDS = 60.0
"""Seconds for its ranks to start, and then for them to end."""
SLOW = {"gloo": 10e6, "nccl": 500e6}
"""Bytes per second of bus bandwidth below which an all-reduce is slow."""
_HINTS = {
    "gloo": "GLOO_SOCKET_IFNAME chooses gloo's network interface",
    "nccl": "NCCL_DEBUG=INFO shows NCCL's choices, and NCCL_SOCKET_IFNAME its interface",
}


def examine_here(wanted: Wanted) -> Report:
    """Examine this machine, for ranks in local mode."""
    ranks = wanted.ranks or LOCAL_RANKS
    machine = _this_machine(ranks)
    checks = checks_of(machine, Needs(gpus=wanted.gpus, min_java=min_java()))
    checks.append(check_tracking(tracking_uri()))
    with shared_marker(wanted.storage_path) as (_, storage_checks):
        checks += storage_checks
    if _prevents_runs(checks):
        checks.append(not_checked(ALL_REDUCE, "an earlier check failed"))
    else:
        settings = {"local_mode": True, "use_gpu": wanted.gpus > 0}
        checks.append(check_all_reduce(ranks, HERE, wanted.spelling, **settings))
    return _report(checks, wanted)


def examine_cluster(
    wanted: Wanted, application: Callable[[], AbstractContextManager[Any]]
) -> Report:
    """Examine the driver's machine and a cluster."""
    machine = _this_machine(0)
    needs = Needs(has_ranks=False, java=Session.active() is None, min_java=min_java())
    checks = checks_of(machine, needs)
    checks.append(check_tracking(tracking_uri()))
    if needs.java and _has_failure(check for check in checks if check.name == "Java"):
        return _report([*checks, *unexamined("Spark cannot start without Java")], wanted)
    try:
        with application() as spark:
            checks += cluster_checks(Session(spark), wanted, machine)
    except ValueError:
        raise
    except Exception as error:  # of the JVM, or of a master that does not answer
        checks.append(failure("Spark", str(error), START_FIX, EXECUTORS))
        checks += unexamined("there is no Spark application")
    return _report(checks, wanted)


def _report(checks: Iterable[Check], wanted: Wanted) -> Report:
    return Report(tuple(check.spelled(wanted.spelling) for check in checks))


def _this_machine(ranks: int) -> Machine:
    folders = [os.getcwd(), *spark_local_dirs()]
    return examine(socket.gethostname(), folders, ranks, in_executor=False)


def _has_failure(checks: Iterable[Check]) -> bool:
    return any(check.status is Status.FAILURE for check in checks)


def _prevents_runs(checks: Iterable[Check]) -> bool:
    """Return whether a check failed without which ranks cannot reduce a tensor."""
    return _has_failure(check for check in checks if check.name not in SERVICES)


def cluster_checks(session: Session, wanted: Wanted, driver: Machine) -> list[Check]:
    """Return the checks of a cluster."""
    checks = configuration_checks(session)
    ranks, use_gpu = wanted.ranks or 1, wanted.gpus > 0
    plan, gpu_checks = make_plan(session, ranks, wanted.spelling, use_gpu=use_gpu)
    checks += gpu_checks
    if plan is None:
        return checks + unexamined("a run with this configuration would be refused")
    slots, check = await_slots(session, plan)
    checks.append(check)
    if slots == 0:
        return checks + unexamined("no executor has a slot")
    examined, found = _examine(session, plan.with_tasks(slots), wanted, driver)
    checks += found
    if _prevents_runs(checks):
        return [*checks, not_checked(ALL_REDUCE, "an earlier check failed", EXECUTORS)]
    ranks = wanted.ranks or min(max(2, len(examined)), slots)
    where = hosts_text(each.machine.host for each in examined)
    settings = {"local_mode": False, "use_gpu": plan.use_gpu, **wanted.run_settings}
    return [*checks, check_all_reduce(ranks, where, wanted.spelling, **settings)]


def unexamined(why: str) -> list[Check]:
    """Return the checks that need executors as not made."""
    return [not_checked(name, why, EXECUTORS) for name in (*ON_EXECUTORS, ALL_REDUCE)]


def _examine(
    session: Session, plan: ClusterPlan, wanted: Wanted, driver: Machine
) -> tuple[list[ExaminedExecutor], list[Check]]:
    """Examine all executors, and return what was found; no executors if their job failed."""
    token = secrets.token_bytes(TOKEN_SIZE)
    with (
        shared_marker(wanted.storage_path) as (marker, storage_checks),
        driver_server(session, wanted, token, plan.num_tasks) as (address, checks),
    ):
        if address is None and not plan.barrier:
            why = "the tasks of the job that examines them would not find each other"
            names = [name for name in ON_EXECUTORS if name not in {each.name for each in checks}]
            return [], [*checks, *(not_checked(name, why, EXECUTORS) for name in names)]
        spec = ExaminationSpec(
            barrier=plan.barrier,
            driver=address,
            token=token,
            ports=port_range("rank_ports", wanted.rank_ports),
            ranks_per_task=plan.ranks_per_task,
            storage=None if _has_failure(storage_checks) else wanted.storage_path,
            marker=marker,
            tracking_uri=tracking_uri(),
        )
        checks += storage_checks
        try:
            examined = run_job(session, plan, spec)
        except DistributorError as error:
            fix = "The message says what to change; the executors' logs have more."
            checks.append(failure("executors", str(error)[:MAX_TEXT], fix, EXECUTORS))
            why = "the executors could not be examined"
            return [], checks + [not_checked(name, why, EXECUTORS) for name in ON_EXECUTORS[1:]]
    checks.append(_number_of_executors(session, plan, examined))
    # Tasks that do not reach the driver do not know that others share their executor.
    examined = [*{each.executor: each for each in examined}.values()]
    return examined, checks + _checks_of_executors(examined, plan, driver)


def _number_of_executors(
    session: Session, plan: ClusterPlan, examined: list[ExaminedExecutor]
) -> Check:
    """Return whether all tasks took part, and on how many executors."""
    hosts = hosts_text(each.machine.host for each in examined)
    executors = {each.executor for each in examined}
    found = f"{counted(len(executors), 'executor')} on {hosts}"
    started = sum(each.tasks for each in examined)
    if started >= plan.num_tasks:
        return ok("executors", found, EXECUTORS)
    return failure(
        "executors",
        f"Spark started {started} of {counted(plan.num_tasks, 'task')} within "
        f"{ARRIVAL_SECONDS:g} s: {found}. {why_no_more(session)}".rstrip(),
        more_slots(session.master),
        EXECUTORS,
    )


def _checks_of_executors(
    examined: list[ExaminedExecutor], plan: ClusterPlan, driver: Machine
) -> list[Check]:
    checks = []
    for each in examined:
        gpus = each.tasks * plan.ranks_per_task if plan.use_gpu else 0
        checks += checks_of(each.machine, Needs(gpus=gpus, in_executor=True), each.machine.host)
        checks += each.checks
    return [
        *merged(checks),
        *differences([each.machine for each in examined], driver),
        *network_checks(
            [path for each in examined for path in each.paths],
            {each.machine.host: each.unreachable for each in examined if each.unreachable},
            len(examined),
        ),
    ]


def await_slots(session: Session, plan: ClusterPlan) -> tuple[int, Check]:
    """Wait for executors, and return how many slots there are for tasks of the plan, and a check.

    Through Connect nobody knows them. With dynamic allocation Spark asks for executors once there
    are tasks, so the slots are those that it may have.
    """
    name, executors, places = "slots", Executors(session), Slots(session, plan)
    profile, most = places.profile, places.limit
    if session.is_connect:
        why = "through Spark Connect nobody knows the slots"
        return plan.num_tasks, not_checked(name, why, EXECUTORS)
    if not plan.barrier:
        slots = max(plan.num_tasks, executors.slots(profile) or 0)
        if most is not None and most < plan.num_tasks:
            text = places.limit_text(plan.num_tasks, most)
            return most, failure(name, text, more_slots(session.master), EXECUTORS)
        found = f"Spark asks for executors for {counted(slots, 'task')}"
        return slots, ok(name, found, EXECUTORS)
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
    session: Session, wanted: Wanted, token: bytes, tasks: int
) -> Iterator[tuple[tuple[str, int] | None, list[Check]]]:
    """Listen where the hub of a run would listen, also for tasks that exchange texts."""
    address = choose_hub_address(session, wanted.hub_address, wanted.hub_port)
    try:
        ports = range(address.port, address.port + 1)
        server = ProbeServer(address.bound, token, ports, Exchange(tasks))
    except OSError as error:
        found = f"The driver cannot listen at {address.bound}, port {address.port}: {error}."
        yield None, [failure("network to the driver", found, HUB_FIX)]
        return
    with server:
        yield (address.advertised, server.address[1]), []


def run_job(session: Session, plan: ClusterPlan, spec: ExaminationSpec) -> list[ExaminedExecutor]:
    """Run the job on all slots of a plan, and return what it found on each executor."""
    endings: queue.Queue[Any] = queue.Queue()
    try:
        rows = session.spark.range(0, plan.num_tasks, 1, plan.num_tasks)
        profile, barrier = Slots(session, plan).profile, plan.barrier
        frame = task_frame(session, rows, TASK, spec, "executor binary", profile, barrier=barrier)
    except Exception as error:  # of the JVM, a Connect server or a full disk
        raise explain(error, plan.num_tasks) from error
    tag = f"distributor-doctor-{uuid.uuid4().hex}"
    with (
        quiet(session, tag),
        SparkJob(
            session,
            frame,
            tag,
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
    barrier = slots.plan.barrier
    start = START_SECONDS if barrier else FIRST_SECONDS
    seconds = JOB_SECONDS if barrier else ORDINARY_JOB_SECONDS
    try:
        return endings.get(timeout=start)
    except queue.Empty:
        if job.has_begun() is False:
            why = slots.why_not_started(job.other_running_tasks())
            job.cancel()
            tasks = counted(slots.plan.num_tasks, slots.noun)
            raise DistributorError(
                f"Spark started none of {tasks} within {start:g} s. {why}"
            ) from None
    try:
        return endings.get(timeout=seconds)
    except queue.Empty:
        job.cancel()
        raise DistributorError(
            f"The executors did not finish their checks within {start + seconds:g} s."
        ) from None


class _Untracked(TorchDistributor):
    """Leaves no run in MLflow."""

    is_tracked = False


def check_all_reduce(
    ranks: int,
    where: str,
    spelling: Spelling,
    *,
    local_mode: bool,
    use_gpu: bool,
    **settings: Any,
) -> Check:
    """Run ranks that reduce a tensor, and return the bus bandwidth as a check."""
    backend = "nccl" if use_gpu else "gloo"
    try:
        with shown_from(logging.ERROR), spelling.renames():
            seconds = _Untracked(
                ranks,
                local_mode=local_mode,
                use_gpu=use_gpu,
                start_timeout=RUN_SECONDS,
                timeout=RUN_SECONDS,
                show_output="none",
                log_dir=None,
                warm=False,  # which leaves no warm process behind
                max_failures=0,
                **settings,
            ).run(all_reduce, backend, REDUCED_BYTES // 4, REDUCTIONS)
    except Exception as error:
        text = str(error).strip()
        fix = f"The error of the run says more; {_HINTS[backend]}."
        return failure(ALL_REDUCE, f"{backend}: {type(error).__name__}: {text[:1000]}", fix, where)
    bandwidth = 2 * (ranks - 1) / ranks * REDUCED_BYTES / seconds
    found = (
        f"{backend}, {counted(ranks, 'rank')}, {format_bytes(REDUCED_BYTES)}: bus bandwidth "
        f"{format_bytes(bandwidth)}/s"
    )
    if ranks > 1 and bandwidth < SLOW[backend]:
        return warning(
            ALL_REDUCE, f"Slow: {found}.", f"Check the network; {_HINTS[backend]}.", where
        )
    return ok(ALL_REDUCE, found, where)


def all_reduce(backend: str, numbers: int, times: int) -> float:
    """Return the seconds of the fastest of some all-reduces. Runs on the ranks."""
    import os
    import time

    import torch
    import torch.distributed as dist

    dist.init_process_group(backend)
    on_gpu = backend == "nccl"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    tensor = torch.ones(numbers, device="cuda" if on_gpu else "cpu")
    found = []
    for _ in range(times + 1):  # the first one also connects
        dist.barrier()
        begun = time.monotonic()
        dist.all_reduce(tensor)
        tensor[0].item()  # waits for the GPU
        found.append(time.monotonic() - begun)
        tensor.fill_(1)
    dist.destroy_process_group()
    return min(found[1:])
