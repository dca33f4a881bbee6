"""A Spark application of this process's own, for the command line."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distributor.errors import DistributorError
from distributor.launch.output.messages import notify
from distributor.launch.spark.log_quieting import no_warning

MASTERS = (
    r"local(\[([1-9]\d*|\*)(,\s*[1-9]\d*)?\])?",
    r"local-cluster\[\s*[1-9]\d*\s*,\s*[1-9]\d*\s*,\s*[1-9]\d*\s*\]",
    r"spark://[^/\s,:]+:\d+(,[^/\s,:]+:\d+)*",
    r"spark://\[[0-9a-fA-F:]+\]:\d+",
    r"k8s://\S+",
    r"yarn",
)
REACH_SECONDS = 3.0
"""Seconds for a standalone master to take a connection."""
QUIET = {"spark.ui.showConsoleProgress": "false", "spark.log.level": "OFF"}
"""Spark's own settings, until the application has started."""


def check_application(master: str | None, conf: Mapping[str, str]) -> None:
    """Check all that can be checked before Spark starts.

    Parameters
    ----------
    master : str or None
        The master's URL; None for the one that Spark's configuration has.
    conf : mapping of str to str
        Spark's settings.

    Raises
    ------
    ValueError
        For a URL of no known form, and for another Python than this one as the driver's.
    ConnectionError
        If nothing takes a connection at a standalone master's address.
    """
    if master is not None:
        _check_form(master)
        _check_reachable(master)
    _check_driver_python(conf)


@contextmanager
def application(master: str | None, conf: Mapping[str, str]) -> Iterator[Any]:
    """Start a Spark application, and stop it at the end.

    Parameters
    ----------
    master : str or None
        The master's URL; None for the one that Spark's configuration has.
    conf : mapping of str to str
        Spark's settings. ``spark.pyspark.python`` is what executors run, as for spark-submit.

    Raises
    ------
    DistributorError
        If Spark cannot start; says why.
    """
    if python := conf.get("spark.pyspark.python"):
        os.environ["PYSPARK_PYTHON"] = python  # PySpark reads no setting for it
    spark = _start(master, conf)
    try:
        if "spark.log.level" not in conf:
            spark.sparkContext.setLogLevel("ERROR")
        if master is None:
            notify(
                f"No --master was given: Spark runs on {spark.sparkContext.master}, "
                "from its configuration or by default."
            )
        yield spark
    finally:
        spark.stop()


def _start(master: str | None, conf: Mapping[str, str]) -> Any:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("distributor")
    if master is not None:
        builder = builder.master(master)
    for key, value in {**QUIET, **conf}.items():
        builder = builder.config(key, value)
    try:
        with no_warning():
            return builder.getOrCreate()
    except Exception as error:
        where = f" on {master}" if master else ""
        raise DistributorError(f"Spark could not start{where}: {_cause_of(error)}") from None


def _cause_of(error: Exception) -> str:
    """Return the first line of what made Spark fail, without Java's stack."""
    java = getattr(error, "java_exception", None)
    if java is None:
        text = str(error)
        if "JAVA_GATEWAY_EXITED" in text:
            text += " Spark needs Java 17 or later: look at what it printed above."
    else:
        while (cause := java.getCause()) is not None:
            java = cause
        text = java.toString()
    return text.strip().partition("\n")[0]


def _check_form(master: str) -> None:
    if not any(re.fullmatch(form, master) for form in MASTERS):
        raise ValueError(
            f"--master is {master!r}, which is no master of Spark's: expected "
            "spark://HOST:PORT, yarn, k8s://URL, local[N] or local-cluster[N,CORES,MEGABYTES]."
        )
    if master == "yarn" and not {"HADOOP_CONF_DIR", "YARN_CONF_DIR"} & os.environ.keys():
        raise ValueError(
            "--master is 'yarn', but neither HADOOP_CONF_DIR nor YARN_CONF_DIR is set: one of them "
            "names the folder with YARN's configuration."
        )


def _check_reachable(master: str) -> None:
    """Look whether a standalone master is there, for which Spark would wait a minute."""
    if not master.startswith("spark://"):
        return
    failures = []
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
            return
        except (OSError, OverflowError) as error:
            failures.append(f"{address}: {error}")
    raise ConnectionError(
        f"No Spark master answers at {master} ({'; '.join(failures)}). Check --master, and that "
        "the master runs and can be reached from here."
    )


def _check_driver_python(conf: Mapping[str, str]) -> None:
    """Refuse a driver's Python that is not this one: the driver is this process."""
    wanted = conf.get("spark.pyspark.driver.python")
    if wanted is None:
        return
    found = Path(shutil.which(wanted) or wanted).absolute()
    if found != Path(sys.executable).absolute():
        raise ValueError(
            f"spark.pyspark.driver.python is {wanted!r}, but the driver is this process, which "
            f"runs {sys.executable}. Start it with the other one: {wanted} -m distributor run ..."
        )
