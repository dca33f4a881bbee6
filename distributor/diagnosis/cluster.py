"""Examines a cluster: its configuration, its executors, the network, and an all-reduce."""

from __future__ import annotations

import secrets

from distributor.core.addresses import port_range
from distributor.core.text import counted
from distributor.diagnosis.collective import NAME as ALL_REDUCE
from distributor.diagnosis.collective import check_all_reduce
from distributor.diagnosis.comparison import differences, network_checks
from distributor.diagnosis.configuration import configuration_checks, make_plan
from distributor.diagnosis.examination import await_slots, driver_server, run_job
from distributor.diagnosis.executor import ExaminationSpec, ExaminedExecutor
from distributor.diagnosis.machine import Machine
from distributor.diagnosis.machine_checks import Needs, checks_of
from distributor.diagnosis.probe import TOKEN_SIZE
from distributor.diagnosis.report import (
    EXECUTORS,
    Check,
    Status,
    failure,
    hosts_text,
    merged,
    not_checked,
    ok,
)
from distributor.diagnosis.services import shared_marker, tracking_uri
from distributor.diagnosis.settings import Wanted
from distributor.errors import DistributorError
from distributor.launch.spark.plan import ClusterPlan
from distributor.launch.spark.session import Session

ON_EXECUTORS = ("executors", "versions", "network to the driver", "network between executors")
"""Checks that need a job of Spark."""
MAX_TEXT = 2000
"""Characters of an error of Spark that are shown."""


def cluster_checks(session: Session, wanted: Wanted, driver: Machine) -> list[Check]:
    """Return the checks of a cluster.

    Parameters
    ----------
    session : Session
        The session.
    wanted : Wanted
        What a run would need.
    driver : Machine
        What the driver's machine has.
    """
    checks = configuration_checks(session)
    plan, gpu_checks = make_plan(session, wanted.ranks or 1, use_gpu=wanted.gpus > 0)
    checks += gpu_checks
    if plan is None:
        why = "a run with this configuration would be refused"
        return checks + unexamined(why)
    slots, check = await_slots(session, plan)
    checks.append(check)
    if slots == 0:
        return checks + unexamined("no executor has a slot")
    examined, found = _examine(session, plan.with_tasks(slots), wanted, driver)
    checks += found
    if not any(check.status is Status.FAILURE for check in checks):
        ranks = wanted.ranks or min(max(2, len(examined)), slots)
        where = hosts_text(each.host for each in examined)
        checks.append(
            check_all_reduce(
                ranks, where, local_mode=False, use_gpu=plan.use_gpu, **wanted.run_settings
            )
        )
    else:
        checks.append(not_checked(ALL_REDUCE, "an earlier check failed", EXECUTORS))
    return checks


def unexamined(why: str) -> list[Check]:
    """Return the checks that need executors as not made."""
    return [not_checked(name, why, EXECUTORS) for name in (*ON_EXECUTORS, ALL_REDUCE)]


def _examine(
    session: Session, plan: ClusterPlan, wanted: Wanted, driver: Machine
) -> tuple[list[ExaminedExecutor], list[Check]]:
    """Examine all executors, and return what was found; no executors if their job failed."""
    token, uri = secrets.token_bytes(TOKEN_SIZE), tracking_uri()
    with (
        shared_marker(wanted.storage_path) as (marker, storage_checks),
        driver_server(session, wanted, token) as (address, checks),
    ):
        has_storage = not any(check.status is Status.FAILURE for check in storage_checks)
        spec = ExaminationSpec(
            driver=address,
            token=token,
            ports=port_range("rank_ports", wanted.rank_ports),
            ranks_per_task=plan.ranks_per_task,
            storage=wanted.storage_path if has_storage else None,
            marker=marker,
            tracking_uri=uri,
        )
        checks += storage_checks
        try:
            examined = run_job(session, plan, spec)
        except DistributorError as error:
            fix = "The message says what to change; the executors' logs have more."
            checks.append(failure("executors", str(error)[:MAX_TEXT], fix, EXECUTORS))
            why = "the executors could not be examined"
            return [], checks + [not_checked(name, why, EXECUTORS) for name in ON_EXECUTORS[1:]]
    return examined, checks + _checks_of_executors(examined, plan, driver)


def _checks_of_executors(
    examined: list[ExaminedExecutor], plan: ClusterPlan, driver: Machine
) -> list[Check]:
    hosts = hosts_text(each.host for each in examined)
    found = f"{counted(len(examined), 'executor')} on {hosts}"
    checks = []
    for each in examined:
        gpus = each.tasks * plan.ranks_per_task if plan.use_gpu else 0
        checks += checks_of(each.machine, Needs(java=False, gpus=gpus, min_java=0), each.host)
        checks += each.checks
    return [
        ok("executors", found, EXECUTORS),
        *merged(checks),
        *differences(examined, driver),
        *network_checks(examined),
    ]
