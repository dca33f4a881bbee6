"""Examines this machine alone, or a cluster whose Spark application may have to be started.

An examination is a run that trains nothing: what keeps it from starting is what it reports.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from distributor.control.waiting import Cancellation
from distributor.core.addresses import host_name, joined, resolve
from distributor.core.spelling import Message
from distributor.core.text import counted
from distributor.diagnosis.machine import (
    Machine,
    check_storage,
    examine,
    machine_checks,
    shared_marker,
    version_check,
)
from distributor.diagnosis.report import (
    EXECUTORS,
    HERE,
    Check,
    Report,
    Status,
    Wanted,
    failure,
    hosts_text,
    listed,
    merged,
    not_checked,
    ok,
    warning,
)
from distributor.launchers.spark.executors import (
    Executors,
    container_shortage,
    ended_executors,
)
from distributor.launchers.spark.hub_address import choose_hub_address, open_hub
from distributor.launchers.spark.slots import Slots, why_few_slots
from distributor.node.agent.network import source_address
from distributor.node.agent.node_warnings import memory_warnings
from distributor.screen.messages import shown_from
from distributor.spark.application import how_to_install, java_here, min_java, problem_of
from distributor.spark.error_translation import more_slots
from distributor.spark.plan import ClusterPlan, assigns_gpus, plan_cluster
from distributor.spark.session import EXECUTOR_GPUS, TASK_GPUS, Session
from distributor.torch_distributor import TorchDistributor

CONNECT_SECONDS = 3.0
EXCHANGE_SECONDS = 30.0
"""Seconds for all ranks to do the same."""
MAX_THREADS = 64


class RankSpec(NamedTuple):
    """What each rank examines.

    Parameters
    ----------
    backend : str
        The backend of the collective, "gloo" or "nccl".
    driver : tuple of str and int, optional
        Where the hub listens; None in local mode.
    storage : str, optional
        Storage that has the driver's marker.
    marker : str
        The name of the marker.
    """

    backend: str
    driver: tuple[str, int] | None = None
    storage: str | None = None
    marker: str = ""


@dataclass(frozen=True)
class ExaminedRank:
    """What one rank has found."""

    machine: Machine
    to_driver: str
    """Why it cannot connect to the driver; empty if it can."""
    to_hosts: Mapping[str, str]
    """The hosts of other ranks to which it cannot connect, and why."""
    storage: Check | None
    collective: str
    """The error of the collective; empty if there is none."""


def examine_rank(spec: RankSpec) -> ExaminedRank:
    """Examine this rank's machine, and its connections to the driver and the other ranks."""
    host = host_name()
    to_hosts, is_connected = _connect_to_others(host)
    return ExaminedRank(
        machine=examine(host),
        to_driver=_why_unreachable(spec.driver) if spec.driver else "",
        to_hosts=to_hosts,
        storage=check_storage(spec.storage, spec.marker, host) if spec.storage else None,
        collective=_reduce(spec.backend) if is_connected else "",
    )


def _connect_to_others(host: str) -> tuple[dict[str, str], bool]:
    """Connect to a rank of each other host; return why some fail, and whether no rank's do."""
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=EXCHANGE_SECONDS)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        master, port, is_master=False, timeout=timeout
    )

    def exchange(name: str, own: Any) -> list[Any]:
        store.set(f"doctor/{name}/{rank}", json.dumps(own))
        return [json.loads(store.get(f"doctor/{name}/{each}")) for each in range(size)]

    own = source_address(master)
    with socket.create_server((own, 0), family=resolve(own)[0], backlog=size) as server:
        found = exchange("address", [host, own, server.getsockname()[1]])
        others = {name: (address, port) for name, address, port in found if name != host}
        with ThreadPoolExecutor(MAX_THREADS) as pool:
            errors = zip(others, pool.map(_why_unreachable, others.values()), strict=True)
            to_hosts = {name: error for name, error in errors if error}
        # The server is open until all ranks have connected.
        return to_hosts, not any(exchange("errors", to_hosts))


def _why_unreachable(address: tuple[str, int]) -> str:
    try:
        socket.create_connection(address, CONNECT_SECONDS).close()
    except OSError as error:
        return f"{joined(*address)}: {error}"
    return ""


def _reduce(backend: str) -> str:
    """Reduce a tensor over all ranks, and return the error; empty if there is none."""
    import torch
    import torch.distributed as dist

    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=EXCHANGE_SECONDS))
        device = f"cuda:{os.environ['LOCAL_RANK']}" if backend == "nccl" else "cpu"
        tensor = torch.ones(1, device=device)
        dist.all_reduce(tensor)
        tensor.item()  # waits for the GPU
        dist.destroy_process_group()
    except Exception as error:  # of torch, gloo or NCCL
        return f"{type(error).__name__}: {error}"
    return ""


RUN, TO_DRIVER, BETWEEN = "run", "network to the driver", "network between executors"
ON_EXECUTORS = ("versions", TO_DRIVER, BETWEEN)
"""Checks that the ranks of a cluster make."""
LOCAL_RANKS = 2
"""Ranks on this machine if the user names no number."""
RUN_SECONDS = 120.0
"""Seconds for the run. The first import of torch from a shared disk can take a minute."""
MAX_TEXT = 2000
"""Characters of an error that are shown."""
START_FIX = (
    "Correct what the message names. The master and Spark's configuration decide how Spark starts."
)
RUN_FIX = (
    "The message says what to change; the logs of the executors have more. If nothing was "
    "received from a task, its executor may not reach the other ones, from which it also gets "
    "what Spark sends: see spark.blockManager.port."
)
HUB_FIX = Message(
    "Allow connections from the executors to the driver's port, and set {hub_port} "
    "(spark.distributor.hub.port) to a port that is open, or {hub_address} to an address of the "
    "driver that the executors reach."
)
RANKS_FIX = Message(
    "Allow TCP connections between the hosts of the executors, in both directions: {rank_ports} "
    "(spark.distributor.rank.ports) limits the port of rank 0's store, and "
    "net.ipv4.ip_local_port_range of the hosts limits the ports of gloo and NCCL."
)
_HINTS = {
    "gloo": "GLOO_SOCKET_IFNAME chooses gloo's network interface",
    "nccl": "NCCL_DEBUG=INFO shows NCCL's choices, and NCCL_SOCKET_IFNAME its interface",
}


def examine_here(wanted: Wanted) -> Report:
    """Examine this machine, for ranks in local mode."""
    ranks = wanted.ranks or LOCAL_RANKS
    checks = [_java(is_needed=False), *machine_checks(examine(host_name()), wanted.gpus)]
    checks += _memory(ranks)
    if _has_failure(checks):
        checks.append(not_checked(RUN, "an earlier check failed"))
    else:
        spec = RankSpec(_backend(wanted))
        checks += _run(ranks, spec, wanted, HERE, local_mode=True)[1]
    with shared_marker(wanted.storage_path) as (_, check):
        checks.append(check)
    return _report(checks, wanted)


def examine_cluster(
    wanted: Wanted, application: Callable[[], AbstractContextManager[Any]]
) -> Report:
    """Examine the driver's machine and a cluster."""
    starts_spark = Session.active() is None
    checks = [_java(is_needed=starts_spark)]
    if starts_spark and _has_failure(checks):
        return _report([*checks, *unexamined("Spark cannot start without Java")], wanted)
    try:
        with application() as spark:
            checks += cluster_checks(Session(spark), wanted)
    except ValueError:
        raise
    except Exception as error:  # of the JVM, or of a master that does not answer
        checks.append(failure("Spark", str(error), START_FIX, EXECUTORS))
        checks += unexamined("there is no Spark application")
    return _report(checks, wanted)


def cluster_checks(session: Session, wanted: Wanted) -> list[Check]:
    """Return the checks of a cluster."""
    plan, checks = _plan(session, wanted)
    if plan is None:
        return checks + unexamined("a run with this configuration would be refused")
    if shortage := container_shortage(session.conf, plan.num_tasks, plan.ranks_per_task, warm=True):
        fix = "Raise spark.executor.memoryOverhead."
        checks.append(warning("executor memory", shortage, fix, EXECUTORS))
    slots, check = _slots(session, plan, is_number_wanted=wanted.ranks is not None)
    checks.append(check)
    if slots == 0:
        return checks + unexamined("no executor has a slot")
    address = choose_hub_address(session, wanted.hub_address, wanted.hub_port)
    try:
        hub = open_hub(address, secrets.token_bytes(32), is_required=not plan.barrier)
    except OSError as error:
        checks.append(failure(TO_DRIVER, str(error), HUB_FIX))
        names = (RUN, "versions", BETWEEN)
        why = "the driver cannot listen for the ranks"
        return checks + [not_checked(name, why, EXECUTORS) for name in names]
    with hub, shared_marker(wanted.storage_path) as (marker, storage):
        spec = RankSpec(
            _backend(wanted),
            hub.address,
            wanted.storage_path if storage.status is Status.OK else None,
            marker,
        )
        ranks = slots * plan.ranks_per_task
        examined, found = _run(ranks, spec, wanted, EXECUTORS, local_mode=False)
    checks += [storage, *found]
    if not examined:
        why = "the run did not start"
        return checks + [not_checked(name, why, EXECUTORS) for name in ON_EXECUTORS]
    return checks + _checks_of_ranks(examined, use_gpu=plan.use_gpu)


def unexamined(why: str) -> list[Check]:
    """Return the checks that need a run as not made."""
    return [not_checked(name, why, EXECUTORS) for name in (RUN, *ON_EXECUTORS)]


def _report(checks: Iterable[Check], wanted: Wanted) -> Report:
    return Report(tuple(check.spelled(wanted.spelling) for check in checks))


def _has_failure(checks: Iterable[Check]) -> bool:
    return any(check.status is Status.FAILURE for check in checks)


def _backend(wanted: Wanted) -> str:
    return "nccl" if wanted.gpus else "gloo"


def _java(*, is_needed: bool) -> Check:
    least, (path, version) = min_java(), java_here()
    if not (problem := problem_of(path, version, least)):
        return ok("Java", version)
    if is_needed:
        return failure("Java", problem, how_to_install(least))
    fix = f"{how_to_install(least)} Only runs on a cluster need it."
    return warning("Java", problem, fix)


def _memory(ranks: int) -> list[Check]:
    fix = "Raise the limit, or start fewer ranks on this host."
    needed = memory_warnings(ranks, 1, warm=True, is_warm=lambda: False)
    texts = [" ".join(filter(None, (each.text, each.detail))) for each in needed]
    checks = [failure("memory", text[:1].upper() + text[1:], fix) for text in texts]
    return checks or [ok("memory", "enough for Python and torch in the ranks")]


def _plan(session: Session, wanted: Wanted) -> tuple[ClusterPlan | None, list[Check]]:
    """Plan a run, and return the checks of its GPUs."""
    use_gpu, where = wanted.gpus > 0, "Spark's configuration"
    try:
        with wanted.spelling.renames():
            plan = plan_cluster(session, wanted.ranks or 1, use_gpu, None)
    except (RuntimeError, ValueError) as error:
        fix = (
            f"Set {EXECUTOR_GPUS}, {TASK_GPUS} and a discovery script when the session is made "
            "(conf/spark-defaults-gpu.conf)."
        )
        return None, [failure("GPUs", str(error), fix, where)]
    if use_gpu and not (plan.profile_gpus or session.is_local_master or assigns_gpus(session)):
        fix = "Set it when the session is made (conf/spark-defaults-gpu.conf)."
        return None, [failure("GPUs", f"{TASK_GPUS} was set after Spark's start.", fix, where)]
    found = f"{plan.ranks_per_task} for each of {plan.num_tasks} tasks"
    return plan, [ok("GPUs", found, where)] if use_gpu else []


def _slots(session: Session, plan: ClusterPlan, *, is_number_wanted: bool) -> tuple[int, Check]:
    """Wait for executors, and return how many tasks the run may have, and a check.

    Through Connect nobody knows the slots. With dynamic allocation Spark asks for executors once
    there are tasks. If the user wants no number of ranks, there is a task for each executor.
    """
    slots, wanted = Slots(session, plan), plan.num_tasks
    if session.is_connect:
        why = "through Spark Connect nobody knows the slots"
        return wanted, not_checked("slots", why, EXECUTORS)
    fix = more_slots(session.master)
    if not plan.barrier:
        most = slots.limit
        if most is not None and most < wanted:
            return most, failure("slots", slots.limit_text(wanted, most), fix, EXECUTORS)
        found = f"Spark asks for executors for {counted(wanted, 'task')}"
        return wanted, ok("slots", found, EXECUTORS)
    with ended_executors(session) as describe_ended:
        most = wanted if is_number_wanted else sys.maxsize
        free = slots.await_at_most(most, Cancellation())
        if free < wanted:
            found = why_few_slots(session, plan, free, describe_ended())
            return free, failure("slots", found, fix, EXECUTORS)
    if not is_number_wanted:
        wanted = min(free, max(LOCAL_RANKS, Executors(session).count()))
    return wanted, ok("slots", f"enough for {counted(wanted, 'task')}", EXECUTORS)


class _Untracked(TorchDistributor):
    """Leaves no run in MLflow."""

    is_tracked = False


def _run(
    ranks: int, spec: RankSpec, wanted: Wanted, where: str, *, local_mode: bool
) -> tuple[Sequence[ExaminedRank], list[Check]]:
    """Run ranks, and return what each has found, if they started, with the check of the run."""
    settings: Mapping[str, Any] = {} if local_mode else wanted.run_settings
    try:
        with shown_from(logging.ERROR), wanted.spelling.renames():
            examined = _Untracked(
                ranks,
                local_mode=local_mode,
                use_gpu=wanted.gpus > 0,
                start_timeout=RUN_SECONDS,
                timeout=RUN_SECONDS,
                show_output="none",
                log_dir=None,
                warm=False,  # which leaves no warm process behind
                max_failures=0,
                **settings,
            ).run_all(examine_rank, spec)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip()[:MAX_TEXT]}"
        return [], [failure(RUN, text, RUN_FIX, where)]
    if not local_mode:
        where = hosts_text(each.machine.host for each in examined)
    errors = [each.collective for each in examined if each.collective]
    if errors:
        return examined, [
            failure(
                RUN, f"{spec.backend}: {errors[0][:MAX_TEXT]}", f"{_HINTS[spec.backend]}.", where
            )
        ]
    if any(each.to_hosts for each in examined):
        return examined, [not_checked(RUN, "some executors cannot reach others", where)]
    found = f"{counted(ranks, 'rank')} started, and reduced a tensor over {spec.backend}"
    return examined, [ok(RUN, found, where)]


def _checks_of_ranks(examined: Sequence[ExaminedRank], *, use_gpu: bool) -> list[Check]:
    hosts = [each.machine.host for each in examined]
    machines = {each.machine.host: each.machine for each in examined}
    checks = [
        check
        for host, machine in machines.items()
        for check in machine_checks(machine, hosts.count(host) if use_gpu else 0, host)
    ]
    checks += [each.storage for each in examined if each.storage]
    return [
        *merged(checks),
        version_check([*machines.values()], examine(host_name())),
        _to_driver(examined),
        _between(examined),
    ]


def _to_driver(examined: Sequence[ExaminedRank]) -> Check:
    errors = {each.machine.host: each.to_driver for each in examined if each.to_driver}
    if errors:
        found = listed(f"{host} to the driver at {error}" for host, error in errors.items())
        return failure(TO_DRIVER, f"No connection from {found}.", HUB_FIX, hosts_text(errors))
    where = hosts_text(each.machine.host for each in examined)
    return ok(TO_DRIVER, "all ranks connect to it", where)


def _between(examined: Sequence[ExaminedRank]) -> Check:
    hosts = {each.machine.host for each in examined}
    errors = {
        (each.machine.host, other): error
        for each in examined
        for other, error in each.to_hosts.items()
    }
    if errors:
        found = listed(f"{host} to {other} at {error}" for (host, other), error in errors.items())
        where = hosts_text(host for host, _ in errors)
        return failure(BETWEEN, f"No connection from {found}.", RANKS_FIX, where)
    if len(hosts) == 1:
        return not_checked(BETWEEN, "all ranks are on one host", hosts_text(hosts))
    return ok(
        BETWEEN, f"each of {counted(len(hosts), 'host')} reaches the others", hosts_text(hosts)
    )
