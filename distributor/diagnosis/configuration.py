"""What is wrong with the configuration of a Spark session, for jobs of ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from distributor.core.addresses import bare, resolve
from distributor.core.spelling import Message, Spelling
from distributor.diagnosis.report import Check, failure, ok, warning
from distributor.launchers.spark.capacity.container_memory import container_shortage
from distributor.launchers.spark.capacity.executors import MAX_EXECUTORS
from distributor.spark.error_translation import SET_PYTHON
from distributor.spark.executor_resources import EXECUTOR_GPUS, TASK_GPUS
from distributor.spark.plan import (
    ClusterPlan,
    assigns_gpus,
    plan_cluster,
    runs_barrier_stages,
)
from distributor.spark.session import Session

SPECULATION = "spark.speculation"
TLS, IGNORE_TLS = "spark.ssl.enabled", "pytorch.spark.distributor.ignoreSsl"
ENCRYPTION = ("spark.network.crypto.enabled", "spark.authenticate.enableSaslEncryption")
SYNC, MIN_SYNC_SECONDS = "spark.barrier.sync.timeout", 60
MAX_FAILURES = "spark.executor.maxNumFailures"
FAILURES_EXPIRE = "spark.executor.failuresValidityInterval"
BIND_ADDRESS, USE_POD_ADDRESS = (
    "spark.driver.bindAddress",
    "spark.kubernetes.executor.useDriverPodIP",
)
GRACE = "spark.kubernetes.executor.terminationGracePeriodSeconds"
DISCOVERY = "spark.executor.resource.gpu.discoveryScript"
EXECUTORS_PYTHON = "spark.executorEnv.PYSPARK_PYTHON"
ADDRESS_SPACE = "spark.executor.pyspark.memory"
WHERE, ENVIRONMENT = "Spark's configuration", "the driver's environment"


def configuration_checks(session: Session) -> list[Check]:
    """Return the checks of the properties of a session, and of the driver's environment."""
    checks = [check for make in _CHECKS for check in make(session)]
    return [*_python(session), *(replace(check, where=WHERE) for check in checks)]


def make_plan(
    session: Session, ranks: int, spelling: Spelling, *, use_gpu: bool
) -> tuple[ClusterPlan | None, list[Check]]:
    """Plan a run, and return the checks of its GPUs."""
    try:
        with spelling.renames():
            plan = plan_cluster(session, ranks, use_gpu, None)
    except (RuntimeError, ValueError) as error:
        fix = (
            f"Set {EXECUTOR_GPUS}, {TASK_GPUS} and a discovery script when the session is made "
            "(conf/spark-defaults-gpu.conf)."
        )
        return None, [failure("GPUs", str(error), fix, WHERE)]
    if use_gpu and not (plan.profile_gpus or session.is_local_master or assigns_gpus(session)):
        fix = "Set it when the session is made (conf/spark-defaults-gpu.conf)."
        return None, [failure("GPUs", f"{TASK_GPUS} was set after Spark's start.", fix, WHERE)]
    found = f"{plan.ranks_per_task} for each of {plan.num_tasks} tasks"
    return plan, [ok("GPUs", found, WHERE)] if use_gpu else []


def is_on(session: Session, key: str) -> bool:
    """Return whether a switch among the properties is on."""
    return (session.conf(key) or "false").lower() == "true"


def _dynamic_allocation(session: Session) -> Iterator[Check]:
    if runs_barrier_stages(session):
        yield ok("dynamic allocation", "off")
        return
    most = session.conf(MAX_EXECUTORS)
    limit = f" ({MAX_EXECUTORS} is {most})" if most else ""
    yield ok("dynamic allocation", f"on{limit}; ranks run in the tasks of ordinary jobs")


def _speculation(session: Session) -> Iterator[Check]:
    if is_on(session, SPECULATION):
        yield warning(
            "speculation",
            f"{SPECULATION} is true. Spark starts no rank twice, but may compute the rows of "
            "datasets twice, on executors that train.",
            f"Make the session with {SPECULATION}=false, unless other jobs need it.",
        )
    else:
        yield ok("speculation", "off")


def _encryption(session: Session) -> Iterator[Check]:
    name = "encryption"
    others = [key for key in ENCRYPTION if is_on(session, key)]
    if is_on(session, TLS) and not is_on(session, IGNORE_TLS):
        yield failure(
            name,
            f"{TLS} is true, and the traffic between ranks is not encrypted, so runs are refused.",
            f"Set {IGNORE_TLS}=true to accept unencrypted traffic between ranks.",
        )
    elif others or is_on(session, TLS):
        keys = ", ".join(others or [TLS])
        yield warning(
            name,
            f"Spark's own traffic is encrypted ({keys}), and that between ranks is not.",
            "Train in a network that you trust, or encrypt below TCP (WireGuard, IPsec).",
        )
    else:
        yield ok(name, "off; the traffic between ranks is not encrypted either")


def _barrier(session: Session) -> Iterator[Check]:
    if not runs_barrier_stages(session):
        yield ok("barrier", "runs use no barrier stage")
        return
    text = session.conf(SYNC) or "365d"
    seconds = _seconds(text)
    if seconds is not None and seconds < MIN_SYNC_SECONDS:
        yield failure(
            "barrier",
            f"{SYNC} is {text}: a node that takes longer to start ends the run.",
            f"Leave {SYNC} unset.",
        )
    else:
        yield ok("barrier", f"{SYNC} is {text}")


def _executor_memory(session: Session) -> Iterator[Check]:
    name = "executor memory"
    if value := session.conf(ADDRESS_SPACE):
        yield warning(
            name,
            f"{ADDRESS_SPACE} is {value}, which limits the address space of each rank.",
            f"Leave {ADDRESS_SPACE} unset, and set spark.executor.memoryOverhead instead.",
        )
    elif shortage := container_shortage(session.conf, 1, 1, warm=True):
        yield failure(name, shortage, "Raise spark.executor.memoryOverhead.")
    else:
        yield ok(name, "no limit that ranks would exceed")


def _executor_failures(session: Session) -> Iterator[Check]:
    if not session.master.startswith(("yarn", "k8s://")):
        return
    name = "executor failures"
    limit = session.conf(MAX_FAILURES)
    if limit or session.conf(FAILURES_EXPIRE):
        yield ok(name, f"{MAX_FAILURES} is {limit or 'unset, and failures expire'}")
        return
    most = max(3, 2 * int(session.conf("spark.executor.instances") or 2))
    yield warning(
        name,
        Message(
            "Once {most} executors have failed, Spark ends the application, and with it every "
            "run, whatever {max_failures} is.",
            most=most,
        ),
        f"For long runs, make the session with a larger {MAX_FAILURES}, and {FAILURES_EXPIRE}=1h.",
        WHERE,
    )


def _yarn(session: Session) -> Iterator[Check]:
    script = session.conf(DISCOVERY) or ""
    if session.master == "yarn" and script and "/" not in script:
        yield failure(
            "discovery script",
            f"{DISCOVERY} is {script}, without a slash: executors look for it in their PATH, "
            "do not find it, and end at once.",
            f"Make the session with {DISCOVERY}=./{script}, and send the file with --files.",
        )


def _kubernetes(session: Session) -> Iterator[Check]:
    if not session.master.startswith("k8s://"):
        return
    is_bound_anywhere = session.conf(BIND_ADDRESS) in ("0.0.0.0", "::")
    in_client_mode = (session.conf("spark.submit.deployMode") or "client") == "client"
    takes_bound = (session.conf(USE_POD_ADDRESS) or "true").lower() == "true"
    if is_bound_anywhere and in_client_mode and takes_bound:
        yield failure(
            "driver's address",
            f"{BIND_ADDRESS} is {session.conf(BIND_ADDRESS)}, and since Spark 4.1 executors "
            f"connect to it, because {USE_POD_ADDRESS} is true. They end at once.",
            f"Make the session with {USE_POD_ADDRESS}=false.",
        )
    if is_on(session, "spark.decommission.enabled") and not session.conf(GRACE):
        yield warning(
            "grace period",
            f"{GRACE} is unset: a pod that is preempted has 30 s for a checkpoint, whatever its "
            "template says.",
            f"Make the session with a longer {GRACE}, such as 120s.",
        )


def _python(session: Session) -> Iterator[Check]:
    name = "PYSPARK_PYTHON"
    value = os.environ.get(name)
    is_checked = not session.is_one_machine and not session.is_connect
    others = session.conf(EXECUTORS_PYTHON)
    if is_checked and others and others != value:
        yield warning(
            name,
            f"{EXECUTORS_PYTHON} is {others}, which has no effect: executors run "
            f"{value or 'the python3 of their PATH'}.",
            SET_PYTHON,
            WHERE,
        )
    elif is_checked and value is None:
        yield warning(
            name,
            f"{name} is unset: executors run the python3 of their PATH.",
            SET_PYTHON,
            ENVIRONMENT,
        )
    else:
        yield ok(name, value or "the driver's interpreter", ENVIRONMENT)


def _driver_host(session: Session) -> Iterator[Check]:
    host = bare(session.conf("spark.driver.host") or "")
    if not host or session.is_connect:
        return
    try:
        resolve(host)
    except OSError as error:
        yield failure(
            "host name",
            f"spark.driver.host is '{host}', which cannot be resolved: {error}.",
            "Set spark.driver.host to a name or address of the driver that all hosts resolve.",
        )


_UNITS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "": 1}


def _seconds(text: str) -> float | None:
    """Return the seconds of a duration as Spark writes it; None if it is none."""
    found = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    unit = _UNITS.get(found[2]) if found else None
    return None if found is None or unit is None else int(found[1]) * unit


_CHECKS: tuple[Callable[[Session], Iterator[Check]], ...] = (
    _dynamic_allocation,
    _speculation,
    _encryption,
    _barrier,
    _executor_memory,
    _executor_failures,
    _yarn,
    _kubernetes,
    _driver_host,
)
