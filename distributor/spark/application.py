"""Starts a Spark application for the command line."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from distributor.core.extras import require_spark
from distributor.errors import DistributorError
from distributor.screen.messages import notify
from distributor.spark.java import why_no_java
from distributor.spark.log_quieting import no_warning

MASTERS = (
    r"local(\[([1-9]\d*|\*)(,\s*[1-9]\d*)?\])?",
    r"local-cluster\[\s*[1-9]\d*\s*,\s*[1-9]\d*\s*,\s*[1-9]\d*\s*\]",
    r"spark://[^/\s,:]+:\d+(,[^/\s,:]+:\d+)*",
    r"spark://\[[0-9a-fA-F:]+\]:\d+",
    r"k8s://\S+",
    r"yarn",
)
CONNECT_TIMEOUT = 3.0
"""Seconds for a standalone master to accept a connection."""
STARTUP_CONF = {"spark.ui.showConsoleProgress": "false", "spark.log.level": "OFF"}
"""Spark properties that keep Spark silent until the application has started."""
LOGGING = r"""
rootLogger.level = warn
rootLogger.appenderRef.stdout.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{yy/MM/dd HH:mm:ss} %p %c{1}: %m%n%ex
"""
"""Spark's own default for Python, without its lines about this default."""
JVM_OPTIONS = "SPARK_SUBMIT_OPTS"
"""The variable with options of Spark's JVM; those of Spark's configuration take precedence."""


def check_application(master: str | None, conf: Mapping[str, str]) -> None:
    """Check everything that can be checked before Spark starts."""
    require_spark()
    if master is not None:
        _check_form(master)
        _check_reachable(master)
    _check_driver_python(conf)
    if lack := why_no_java():
        raise DistributorError(lack)


@contextmanager
def application(master: str | None, conf: Mapping[str, str]) -> Iterator[Any]:
    """Start a Spark application, and stop it at the end."""
    if python := conf.get("spark.pyspark.python"):
        os.environ["PYSPARK_PYTHON"] = python  # PySpark does not read the property
    is_quiet = "spark.log.level" not in conf
    with _default_logging() if is_quiet else nullcontext():
        spark = _start(master, conf)
    try:
        if is_quiet:
            spark.sparkContext.setLogLevel("ERROR")
        if master is None:
            notify(
                f"No --master was given: Spark runs on {spark.sparkContext.master}, "
                "from its configuration or by default."
            )
        yield spark
    finally:
        if is_quiet:
            with suppress(Exception):  # the JVM may have ended
                spark.sparkContext.setLogLevel("OFF")  # of tasks that end during the stop
        spark.stop()


@contextmanager
def _default_logging() -> Iterator[None]:
    """Have a JVM that starts now log by `LOGGING`, unless the user has configured Spark's log."""
    import pyspark

    home = Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent)
    folder = Path(os.environ.get("SPARK_CONF_DIR") or home / "conf")
    options = os.environ.get(JVM_OPTIONS)
    if "log4j" in (options or "") or any(folder.glob("log4j2*")):
        yield
        return
    with NamedTemporaryFile("w", prefix="log4j2-", suffix=".properties") as file:
        file.write(LOGGING)
        file.flush()
        option = f'"-Dlog4j2.configurationFile={file.name}"'
        os.environ[JVM_OPTIONS] = f"{options} {option}" if options else option
        try:
            yield
        finally:
            if options is None:
                del os.environ[JVM_OPTIONS]
            else:
                os.environ[JVM_OPTIONS] = options


def _start(master: str | None, conf: Mapping[str, str]) -> Any:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("distributor")
    if master is not None:
        builder = builder.master(master)
    for key, value in {**STARTUP_CONF, **conf}.items():
        builder = builder.config(key, value)
    try:
        with no_warning():
            return builder.getOrCreate()
    except Exception as error:
        where = f" on {master}" if master else ""
        raise DistributorError(f"Spark could not start{where}: {_cause_of(error)}") from None


def _cause_of(error: Exception) -> str:
    """Return the first line of the cause, without the Java stack."""
    java = getattr(error, "java_exception", None)
    if java is None:
        text = str(error)
        if "JAVA_GATEWAY_EXITED" in text:
            text += " Its output is above."
    else:
        while (cause := java.getCause()) is not None:
            java = cause
        text = java.toString()
    return text.strip().partition("\n")[0]


def _check_form(master: str) -> None:
    if not any(re.fullmatch(form, master) for form in MASTERS):
        raise ValueError(
            f"--master is {master!r}, which is not a Spark master URL: expected "
            "spark://HOST:PORT, yarn, k8s://URL, local[N] or local-cluster[N,CORES,MEGABYTES]."
        )
    if master == "yarn" and not {"HADOOP_CONF_DIR", "YARN_CONF_DIR"} & os.environ.keys():
        raise ValueError(
            "--master is 'yarn', but neither HADOOP_CONF_DIR nor YARN_CONF_DIR is set. Set one of "
            "them to the folder with YARN's configuration."
        )


def _check_reachable(master: str) -> None:
    """Check that a standalone master answers, because Spark would wait a minute for it."""
    if not master.startswith("spark://"):
        return
    failures = []
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()
            return
        except (OSError, OverflowError) as error:
            failures.append(f"{address}: {error}")
    raise ConnectionError(
        f"No Spark master answers at {master} ({'; '.join(failures)}). Check --master, and that "
        "the master is running and reachable from this machine."
    )


def _check_driver_python(conf: Mapping[str, str]) -> None:
    """Check that the configured Python of the driver, if any, is that of this process."""
    wanted = conf.get("spark.pyspark.driver.python")
    if wanted is None:
        return
    found = Path(shutil.which(wanted) or wanted).absolute()
    if found != Path(sys.executable).absolute():
        raise ValueError(
            f"spark.pyspark.driver.python is {wanted!r}, but the driver is this process, which "
            f"runs {sys.executable}. To use the other Python: {wanted} -m distributor run ..."
        )
