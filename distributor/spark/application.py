"""The Spark application of this process: how it starts, what it shows, and how it ends."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import metadata
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from distributor._compat import pyspark as private
from distributor._compat.cpython import future_warning_ignored
from distributor._compat.pyspark import TOO_MANY_EXECUTOR_FAILURES
from distributor.core.threads import in_background
from distributor.core.versions import require_spark
from distributor.errors import ApplicationEnded, DistributorError, NodeLost
from distributor.screen.messages import notify

# The Java that Spark runs on

JAVA_SECONDS = 20.0
"""Seconds for ``java -version``."""


def java_here() -> tuple[str, str]:
    """Return the path and the version of the Java that Spark would start here, empty if none."""
    home = os.environ.get("JAVA_HOME")
    path = f"{home}/bin/java" if home else shutil.which("java")
    return (path, java_version(path)) if path else ("", "")


def java_version(path: str) -> str:
    """Return the version of a Java, such as "17.0.15"; empty if it cannot be run."""
    release = Path(os.path.realpath(path)).parent.parent / "release"
    with suppress(OSError):
        if found := re.search(r'^JAVA_VERSION="(.*)"', release.read_text(), re.MULTILINE):
            return found.group(1)
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [path, "-version"], capture_output=True, text=True, timeout=JAVA_SECONDS
        )
        if found := re.search(r'version "(.*?)"', done.stderr + done.stdout):
            return found.group(1)
    return ""


def min_java() -> int:
    """Return the oldest Java on which the installed PySpark runs."""
    try:
        return 17 if int(metadata.version("pyspark").split(".")[0]) >= 4 else 8
    except metadata.PackageNotFoundError:
        return 8


def java_major(version: str) -> int:
    """Return the major version of a Java: 17 for "17.0.15", 8 for "1.8.0_392"."""
    numbers = [int(number) for number in re.findall(r"\d+", version)] or [0]
    return numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]


def problem_of(path: str, version: str, least: int) -> str:
    """Return why Spark cannot run on a Java; empty if it can.

    Parameters
    ----------
    path, version : str
        The Java, and its version; empty if there is none.
    least : int
        The oldest major version that Spark runs on.
    """
    if not path:
        return "There is no Java: JAVA_HOME is unset, and PATH has none."
    if not version:
        return f"{path} does not run, or reports no version."
    if java_major(version) < least:
        return f"Java {version} at {path} is too old for Spark."
    return ""


def how_to_install(least: int) -> str:
    """Return what to do without a Java that is new enough."""
    return (
        f"Install Java {least} or later (Debian and Ubuntu: apt-get install "
        f"openjdk-{max(least, 17)}-jre-headless; Fedora: dnf install "
        f"java-{max(least, 17)}-openjdk-headless; macOS: brew install openjdk@{max(least, 17)}), "
        "and set JAVA_HOME to it or put its java on PATH."
    )


def why_no_java() -> str:
    """Return why Spark cannot start here, and what to do; empty if it can."""
    least = min_java()
    if problem := problem_of(*java_here(), least):
        return f"Spark needs Java {least} or later. {problem} {how_to_install(least)}"
    return ""


# The start, for the command line

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
    options = os.environ.get(JVM_OPTIONS, "")
    if "log4j" in options or any(folder.glob("log4j2*")):
        yield
        return
    with NamedTemporaryFile("w", prefix="log4j2-", suffix=".properties") as file:
        file.write(LOGGING)
        file.flush()
        option = f'"-Dlog4j2.configurationFile={file.name}"'
        os.environ[JVM_OPTIONS] = f"{options} {option}".lstrip()
        try:
            yield
        finally:
            del os.environ[JVM_OPTIONS]
            if options:
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


# What Spark and PySpark show while a run lasts

BAR_SECONDS = 0.2
"""Seconds between two removals of Spark's progress bar: each job that ends lets it return."""
HIDDEN_SECONDS = 30.0
"""Seconds that Spark's progress bar stays away if this process is too busy to remove it again."""


@contextmanager
def no_progress_bar(session: Any) -> Iterator[None]:
    """Hide Spark's progress bar again and again: it cannot be switched off while Spark runs."""
    bar = None
    with suppress(Exception):  # another version of Spark may draw it in another way
        bar = None if session.is_connect else private.progress_bar(session.spark.sparkContext)
    if bar is None:
        yield
        return
    ended = threading.Event()

    def hide() -> None:
        with suppress(Exception):  # Spark may have stopped
            while not ended.wait(BAR_SECONDS):
                bar.hide(HIDDEN_SECONDS)

    bar.hide(HIDDEN_SECONDS)
    thread = threading.Thread(target=hide, name="spark-progress-bar", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(Exception):
            bar.show()


def no_warning() -> AbstractContextManager[None]:
    """Ignore the warning that PySpark issues for a call in this context, on this thread alone."""
    return future_warning_ignored(private.PANDAS_WARNING)


# The end

NOTICE_SECONDS = 2.0
"""Seconds in which Spark notices that the cluster manager has ended an application."""
POLL_SECONDS = 0.2
ANSWER_SECONDS = 30.0
"""Seconds for a Connect server to answer. PySpark would try a dead one for ten minutes."""
YARN_ENDED = ("FINISHED", "FAILED", "KILLED")
NEXT = "Its session can run nothing more: stop it (spark.stop()) if it is not, and make a new one."
RESTART = "With Spark Connect, restart the server first."
NO_ANSWER = (
    f"The Spark Connect server has not answered for {ANSWER_SECONDS:g} s. Check that it runs and "
    "can be reached; if its session is lost, make a new one."
)
JVM_ENDED = (
    "The Spark application has ended: the JVM of this process no longer answers, and PySpark "
    "starts no other one. Start a new process: in a notebook, restart the kernel."
)
MORE_FAILURES = (
    "Spark ends an application once more executors have failed than spark.executor.maxNumFailures. "
    "If executors are often lost, as on spot instances, raise it for the next session, or let old "
    "failures expire: spark.executor.failuresValidityInterval=1h."
)


def check_not_ended(spark: Any) -> None:
    """Check that the application of a ``SparkSession`` has not ended."""
    if end := end_of(spark):
        raise ApplicationEnded(end)


@contextmanager
def end_explained(spark: Any, *, is_last: bool = False) -> Iterator[None]:
    """Raise `ApplicationEnded` in place of the errors that the end of the application causes."""
    try:
        yield
    except Exception as error:
        deadline = time.monotonic() + NOTICE_SECONDS
        while (end := end_of(spark, asks_manager=True)) is None:
            if not (is_last and _may_be_the_end(error, spark)) or time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)
        if end is NO_ANSWER:
            raise  # a server that is only slow does not hide the error
        raise ApplicationEnded(end) from None


def _may_be_the_end(error: Exception, spark: Any) -> bool:
    """Return whether an executor was lost that YARN or Kubernetes may have ended with the rest."""
    is_loss = isinstance(error, NodeLost) and not error.silent
    return is_loss and spark.sparkContext.master.startswith(("yarn", "k8s://"))


def end_of(spark: Any, *, asks_manager: bool = False) -> str | None:
    """Return that a session's application has ended, and why; None while it has not."""
    if private.is_connect_session(spark):
        return _end_of_server(spark)
    context = spark.sparkContext
    try:
        is_stopped = private.is_stopped(context)
        asks_yarn = (is_stopped or asks_manager) and context.master == "yarn"
        reported = _yarn_end(context) if asks_yarn else ""
        if is_stopped and context.master.startswith("k8s://"):
            reported = MORE_FAILURES  # Kubernetes does not report why
    except Exception:
        return JVM_ENDED
    if not (is_stopped or reported):
        return None
    return " ".join(filter(None, ["The Spark application has ended.", reported, NEXT]))


def _yarn_end(context: Any) -> str:
    """Return what YARN reports of an application that has ended; empty while it has not."""
    try:
        state, diagnostics = private.yarn_ending(context, context.applicationId)
    except Exception:
        return ""  # the resource manager does not answer
    if state not in YARN_ENDED:
        return ""
    said = " ".join(diagnostics.split())
    hint = MORE_FAILURES if re.search(TOO_MANY_EXECUTOR_FAILURES, said) else ""
    ending = f"YARN reports {state}{f': {said}' if said else ''}".rstrip(".")
    return f"{ending}. {hint}".rstrip()


def _end_of_server(spark: Any) -> str | None:
    """Return that the Connect server does not serve a session any more; None if it does."""
    asked = in_background(lambda: spark.conf.get("spark.app.id"), "spark-connect-check")
    wait([asked], ANSWER_SECONDS)
    if not asked.done():
        return NO_ANSWER
    if error := asked.exception():
        return f"The Spark Connect server no longer serves this session: {error}. {NEXT} {RESTART}"
    return None
