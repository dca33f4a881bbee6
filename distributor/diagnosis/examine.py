"""Examines this machine alone, or a cluster whose Spark application may have to be started."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from distributor.core.resources import spark_local_dirs
from distributor.diagnosis.cluster import cluster_checks, unexamined
from distributor.diagnosis.collective import NAME as ALL_REDUCE
from distributor.diagnosis.collective import check_all_reduce
from distributor.diagnosis.installed import min_java
from distributor.diagnosis.machine import Machine, examine
from distributor.diagnosis.machine_checks import Needs, checks_of
from distributor.diagnosis.report import (
    EXECUTORS,
    HERE,
    Check,
    Report,
    Status,
    failure,
    not_checked,
)
from distributor.diagnosis.services import check_tracking, shared_marker, tracking_uri
from distributor.diagnosis.settings import Wanted
from distributor.launch.spark.session import Session

LOCAL_RANKS = 2
"""Ranks of the all-reduce on this machine if the user names no number."""
START_FIX = (
    "Correct what the message names; --master, --conf and Spark's configuration decide how Spark "
    "starts."
)


def examine_here(wanted: Wanted) -> Report:
    """Examine this machine, for ranks in local mode."""
    ranks = wanted.ranks or LOCAL_RANKS
    machine = _this_machine(ranks)
    checks = checks_of(machine, Needs(gpus=wanted.gpus, min_java=min_java()), HERE)
    checks.append(check_tracking(tracking_uri()))
    with shared_marker(wanted.storage_path) as (_, storage_checks):
        checks += storage_checks
    if _has_failure(checks):
        checks.append(not_checked(ALL_REDUCE, "an earlier check failed"))
    else:
        checks.append(check_all_reduce(ranks, HERE, local_mode=True, use_gpu=wanted.gpus > 0))
    return Report(tuple(checks))


def examine_cluster(
    wanted: Wanted, application: Callable[[], AbstractContextManager[Any]]
) -> Report:
    """Examine the driver's machine and a cluster.

    Parameters
    ----------
    wanted : Wanted
        What a run would need.
    application : callable
        Returns the context in which there is a Spark session.

    Raises
    ------
    ValueError
        If the application's settings are invalid.
    """
    machine = _this_machine(0)
    needs = Needs(has_ranks=False, java=Session.active() is None, min_java=min_java())
    checks = checks_of(machine, needs, HERE)
    checks.append(check_tracking(tracking_uri()))
    if needs.java and _has_failure(check for check in checks if check.name == "Java"):
        return Report((*checks, *unexamined("Spark cannot start without Java")))
    try:
        with application() as spark:
            checks += cluster_checks(Session(spark), wanted, machine)
    except ValueError:
        raise
    except Exception as error:  # of the JVM, or of a master that does not answer
        checks.append(failure("Spark", str(error), START_FIX, EXECUTORS))
        checks += unexamined("there is no Spark application")
    return Report(tuple(checks))


def _this_machine(ranks: int) -> Machine:
    folders = [os.getcwd(), *spark_local_dirs()]
    return examine(socket.gethostname(), folders, ranks, in_executor=False)


def _has_failure(checks: Iterable[Check]) -> bool:
    return any(check.status is Status.FAILURE for check in checks)
