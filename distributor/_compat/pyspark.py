"""What this package uses of PySpark, and of Spark through py4j, that is not documented.

A ``context`` is a ``pyspark.SparkContext``, which Spark Connect does not have.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any

# Local properties that name a job and its stages in Spark's UI, and hold the details.
CALL_SITE, CALL_SITE_DETAILS = "callSite.short", "callSite.long"

# The logger of the driver's JVM that writes what a standalone master reports of executors.
APPLICATION_LOGGER = "org.apache.spark.deploy.client.StandaloneAppClient$ClientEndpoint"

INTERRUPTED = {
    "root": ("Exception while sending command.", "KeyboardInterrupt while sending command."),
    "py4j.clientserver": ("Exception occurred while shutting down connection",),
}
"""What Py4J logs of calls that Ctrl-C interrupts, by logger."""

# How the warning begins that PySpark issues for each call if pandas 3 is installed.
PANDAS_WARNING = "PySpark does not yet fully support pandas"

# The folder with the Hadoop configuration of spark-submit, in the working folder of a YARN
# container.
HADOOP_CONFIGURATION = "__spark_conf__/__hadoop_conf__"

# The modules that have the class ``SparkFiles``, or had it before PySpark 4.
MODULES_OF_SPARK_FILES = ("pyspark.core.files", "pyspark.files")

# As many failed tasks of a stage are looked at.
MAX_FAILED_TASKS = 10_000

_python_lock = threading.Lock()


def is_connect_session(spark: Any) -> bool:
    """Return whether a session is one of Spark Connect, which has no ``SparkContext``."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def is_pyspark_handler(handler: Any) -> bool:
    """Return whether a handler of SIGINT is the one that a classic session installs."""
    return str(getattr(handler, "__module__", "")).startswith("pyspark.")


def is_same_session(one: Any, other: Any) -> bool:
    """Return whether two sessions are one; classic PySpark may wrap one session twice."""
    if one is other:
        return True
    if is_connect_session(one) or is_connect_session(other):
        return False
    return bool(one._jsparkSession == other._jsparkSession)


def java_context(context: Any) -> Any:
    """Return the JVM's ``SparkContext``."""
    return context._jsc.sc()


def is_stopped(context: Any) -> bool:
    """Return whether an application has ended, by this process or by itself."""
    return context._jsc is None or bool(java_context(context).isStopped())


def jvm_has_ended() -> bool:
    """Return whether this process has had a JVM that no longer answers."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    if gateway is None:
        return False
    try:
        gateway.jvm.java.lang.System.nanoTime()
    except Exception:  # of another type in each version of py4j
        return True
    return False


def yarn_ending(context: Any, application_id: str) -> tuple[str, str]:
    """Return the state of an application, and why it is in it; raise if YARN does not answer."""
    yarn = context._jvm.org.apache.hadoop.yarn
    client = yarn.client.api.YarnClient.createYarnClient()
    client.init(yarn.conf.YarnConfiguration(java_context(context).hadoopConfiguration()))
    client.start()
    try:
        parsed = yarn.api.records.ApplicationId.fromString(application_id)
        report = client.getApplicationReport(parsed)
        return str(report.getYarnApplicationState().toString()), str(report.getDiagnostics())
    finally:
        client.stop()


def max_concurrent_tasks(context: Any, profile: Any = None) -> int:
    """Return how many tasks the executors that have registered can run at once."""
    java = java_context(context)
    manager = java.resourceProfileManager()
    if profile is None:
        return int(java.maxNumConcurrentTasks(manager.defaultResourceProfile()))
    requested = profile._java_resource_profile
    manager.addResourceProfile(requested)
    return int(java.maxNumConcurrentTasks(requested))


def executor_hosts(context: Any) -> list[str]:
    """Return the host of each executor that has registered, and of the driver."""
    return [info.host() for info in java_context(context).statusTracker().getExecutorInfos()]


def sent_hadoop_configuration() -> str | None:
    """Return the folder with the Hadoop configuration that Spark has sent to YARN's container.

    None elsewhere, and if HADOOP_CONF_DIR names another.
    """
    container = os.environ.get("PWD", "")  # the program may have changed its working folder
    folder = os.path.abspath(os.path.join(container, HADOOP_CONFIGURATION))
    is_needed = "HADOOP_CONF_DIR" not in os.environ and os.path.isdir(folder)
    return folder if is_needed else None


def executor_ids(context: Any) -> list[str]:
    """Return the ids of the executors that the scheduler knows; not the driver's."""
    ids: str = java_context(context).schedulerBackend().getExecutorIds().mkString(" ")
    return ids.split()


def executor_host(context: Any, executor: str) -> str:
    """Return the host of an executor; empty until Spark has recorded it."""
    address: str = java_context(context).statusStore().executorSummary(executor).hostPort()
    return address.rpartition(":")[0]


def inactive_executors(context: Any, executors: Iterable[str]) -> list[str]:
    """Return which executors take no tasks: they are lost, or about to be removed."""
    backend = java_context(context).schedulerBackend()
    return [executor for executor in executors if not backend.isExecutorActive(executor)]


def decommissioned_executors(context: Any, executors: Iterable[str]) -> list[str]:
    """Return which executors Spark was notified about that they will end."""
    scheduler = java_context(context).taskScheduler()
    return [each for each in executors if scheduler.getExecutorDecommissionState(each).isDefined()]


def jobs_with_tag(context: Any, tag: str) -> list[int]:
    """Return the ids of the jobs that have a tag."""
    return list(java_context(context).statusTracker().getJobIdsForTag(tag))


def stages_with_tag(context: Any, tag: str) -> set[int]:
    """Return the ids of the stages of the jobs that have a tag."""
    infos = map(context.statusTracker().getJobInfo, jobs_with_tag(context, tag))
    return {stage for info in infos if info for stage in info.stageIds}


def task_failure(context: Any, stages: Iterable[int], task: int) -> str:
    """Return the error of a failed task of these stages, by its id; empty if there is none."""
    store = java_context(context).statusStore()
    api = context._jvm.org.apache.spark.status.api.v1
    failed = context._jvm.java.util.Collections.singletonList(api.TaskStatus.FAILED)
    for stage in stages:
        tasks = store.taskList(stage, 0, 0, MAX_FAILED_TASKS, api.TaskSorting.ID, failed)
        for index in range(tasks.size()):
            found = tasks.apply(index)
            if found.taskId() == task:
                return str(found.errorMessage().get())
    return ""


def barrier_arrivals(context: Any, stages: Container[int]) -> tuple[int, int]:
    """Return how many tasks of stages wait in a barrier now, and how many barriers all passed."""
    coordinator = java_context(context).taskScheduler().barrierCoordinator()
    if coordinator is None:  # until the application's first barrier job
        return 0, 0
    states = _private_field(coordinator, "states").values()
    own = [state for state in states if state.barrierId().stageId() in stages]
    waiting = sum(_private_field(state, "requesters").size() for state in own)
    return waiting, sum(_private_field(state, "barrierEpoch") for state in own)


def _private_field(value: Any, name: str) -> Any:
    """Return the value of a Scala object's private field; the compiler may prefix its name."""
    fields = value.getClass().getDeclaredFields()
    field = next(field for field in fields if field.getName().endswith(name))
    field.setAccessible(True)
    return field.get(value)


def find_spark_files(module: Any, folder: str) -> None:
    """Have ``SparkFiles`` of a module find files in a folder, as it does in a Python worker."""
    module.SparkFiles._root_directory = folder
    module.SparkFiles._is_running_on_worker = True


def temporary_folder(context: Any) -> str:
    """Return the driver's folder that Spark removes when the application ends."""
    return str(context._temp_dir)


@contextlib.contextmanager
def python_executable(context: Any, path: str) -> Iterator[None]:
    """Have functions that are planned in this block run with another interpreter."""
    with _python_lock:
        usual, context.pythonExec = context.pythonExec, path
        try:
            yield
        finally:
            context.pythonExec = usual


def serve_workers() -> None:
    """Be the parent of an executor's Python workers, in a process that Spark has started as it."""
    from pyspark import daemon

    daemon.manager()


def arrow_schema(schema: Any) -> Any:
    """Return the columns of a DataFrame as batches of ``mapInArrow`` have them."""
    from pyspark.sql.pandas.types import to_arrow_schema

    # Versions without this parameter use UTC.
    is_needed = "timezone" in inspect.signature(to_arrow_schema).parameters
    timezone: dict[str, Any] = {"timezone": "UTC"} if is_needed else {}
    return to_arrow_schema(schema, **timezone)


def spark_schema(schema: Any) -> Any:
    """Return the columns of a DataFrame that has those of an Arrow schema."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema, prefer_timestamp_ntz=True)


def parse_type(text: str) -> Any:
    """Return the type, or the columns of a DataFrame, that a text in SQL's language means."""
    from pyspark.sql.types import _parse_datatype_string

    return _parse_datatype_string(text)


def keep_call_site(frame: Any) -> None:
    """Have a classic DataFrame's ``collect`` leave the job's call site as it is."""
    # PySpark would name the line of this package that calls `collect`. A version that works
    # differently names its own.
    if hasattr(frame, "_sc"):
        frame._sc = _Without(
            frame._sc, "_jsc", _Without(frame._sc._jsc, "setCallSite", lambda site: None)
        )


class _Without:
    """Stands for an object, with one attribute replaced."""

    def __init__(self, wrapped: Any, name: str, replacement: Any) -> None:
        self._wrapped = wrapped
        setattr(self, name, replacement)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


class ProgressBar:
    """The progress bar of the driver's JVM."""

    # It is drawn while there are stages, but not within half a second after it was last removed.
    # That time can be set to one in the future.

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._removed_at = bar.getClass().getDeclaredField("lastFinishTime")
        self._removed_at.setAccessible(True)

    def hide(self, seconds: float) -> None:
        """Remove the bar, and keep it away until so many seconds have passed or a job has ended."""
        self._bar.finishAll()
        self._removed_at.setLong(self._bar, int((time.time() + seconds) * 1000))

    def show(self) -> None:
        self._bar.finishAll()


def progress_bar(context: Any) -> ProgressBar | None:
    """Return the JVM's progress bar; None if there is none."""
    bar = java_context(context).progressBar()
    return None if bar.isEmpty() else ProgressBar(bar.get())


class RecordedLog:
    """What a logger of the driver's JVM writes at INFO and above; it still shows as much."""

    def __init__(self, context: Any, name: str) -> None:
        log4j = context._jvm.org.apache.logging.log4j
        self._name = name
        self._logging_context = log4j.LogManager.getContext(False)
        self._own = self._configuration.getLoggers().get(name)
        self._writer = context._jvm.java.io.StringWriter()
        layout = log4j.core.layout.PatternLayout.newBuilder().withPattern("%m%n").build()
        appender = log4j.core.appender.WriterAppender.createAppender(
            layout, None, self._writer, name, False, True
        )
        appender.start()
        recording = log4j.core.config.LoggerConfig(name, log4j.Level.INFO, False)
        recording.addAppender(appender, None, None)
        usual = self._configuration.getLoggerConfig(name)
        level = usual.getLevel()
        while usual is not None:
            for usual_appender in usual.getAppenders().values():
                recording.addAppender(usual_appender, level, None)
            usual = usual.getParent() if usual.isAdditive() else None
        self._replace(recording)

    @property
    def text(self) -> str:
        return str(self._writer.toString())

    def close(self) -> None:
        self._replace(self._own)

    @property
    def _configuration(self) -> Any:
        return self._logging_context.getConfiguration()

    def _replace(self, logger: Any) -> None:
        self._configuration.removeLogger(self._name)
        if logger is not None:
            self._configuration.addLogger(self._name, logger)
        self._logging_context.updateLoggers()


def param(name: str, text: str, convert: Callable[[Any], Any]) -> Any:
    """Return a Param for the body of a class."""
    from pyspark.ml.param import Param, Params

    return Param(Params._dummy(), name, text, convert)


def set_params(instance: Any, defaults: dict[str, Any], values: dict[str, Any]) -> None:
    """Set the defaults of Params, and the values of those that are not None."""
    instance._setDefault(**defaults)
    instance._set(**{name: value for name, value in values.items() if value is not None})


def copy_params(source: Any, target: Any) -> None:
    """Set the Params of an instance, and its uid, as they are in another one."""
    target._resetUid(source.uid)
    source._copyValues(target)


def reset_uid(instance: Any, uid: str) -> None:
    """Set the uid of an instance, also in its Params."""
    instance._resetUid(uid)


def qualified(context: Any, path: str) -> str:
    """Return a path with the file system that Spark takes it to be in."""
    java_path = context._jvm.org.apache.hadoop.fs.Path(path)
    filesystem = java_path.getFileSystem(context._jsc.hadoopConfiguration())
    address = filesystem.makeQualified(java_path)
    if address.toUri().getScheme() == "file":  # a path may contain what an address escapes
        return str(address.toUri().toASCIIString())
    return str(address.toString())


HOST, ID = b"--hostname", b"--executor-id"


def executor_of(pid: int) -> tuple[str, str] | None:
    """Return the host and the id of the executor above a process, by the names that Spark uses.

    None if it has none, as with a local master, or if the system has no /proc.
    """
    while pid > 1:
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return None
        if HOST in arguments and ID in arguments:
            host, number = (arguments[arguments.index(name) + 1] for name in (HOST, ID))
            return os.fsdecode(host), os.fsdecode(number)
        pid = int(fields[1])
    return None


# The text of a failed job's exception contains the errors of its tasks, with stacks.

# The host of the task that failed.
LOST_TASK = r"Lost task \S+ in stage \S+ \(TID \d+\) \(([^\s)]+)"

# A task has failed as often as `spark.task.maxFailures` allows: more than once.
FAILED_TASK = r"\bTask \d+ in stage \S+ failed (?!1 )(\d+) times"

# A barrier job has more tasks than the cluster has slots.
TOO_FEW_SLOTS = r"SPARK-24819|BARRIER_STAGE_NOT_ENOUGH_SLOTS"

FULL_DISK = r"([^\n]*No space left on device[^\n]*)"  # the line of an error about a full disk

# The file that an executor could not write.
NOT_WRITABLE = r"(?:FileSystemException: (\S+): Read-only file system|AccessDeniedException: (\S+))"

# The Python versions of a worker and the driver, which differ.
OTHER_PYTHON = r"worker has different version:? \(?(.*?)\)? than that in driver:? (\S+?),"

NO_MODULE = r"No module named '?([\w.]+)"  # a module that a Python worker does not have

# A package that PySpark needs in its Python workers and does not find.
NO_PACKAGE = r"(?:PACKAGE_NOT_INSTALLED\] |ImportError: )(\w+) >= \S+ must be installed"

NO_INTERPRETER = r'Cannot run program "([^"]+)"'  # the path at which there is no Python interpreter

# Why an executor was lost, in Spark's words, which may have several lines.
LOST_EXECUTOR = r"(ExecutorLostFailure .*?)(?=\n\s*(?:(?:Driver|JVM) stacktrace:|at \S+\()|\Z)"

# What Kubernetes reports of a pod that has ended.
CONTAINER_STATUSES = r"The API gave the following container statuses:.*"

POD_ENDED = r"termination reason: (\S+)"  # why the container of a pod has ended, among these

# A container was killed because its processes needed more memory than it has.
OUT_OF_MEMORY = r"exceeding \w+ memory limits|beyond the '\w+' memory limit|OOMKilled|container OOM"

# YARN took a container back for another application, or Spark decommissioned an executor, as when
# its pod is evicted.
RECLAIMED = r"\bwas preempted\b|\bExecutor decommission\b"

# A Python worker ended without an exception.
CRASHED_WORKER = r"(Python worker exited unexpectedly \(crashed\))"

# An executor that a standalone master starts, and its host.
EXECUTOR_ADDED = r"Executor added: (\S+) on \S+ \((.+):\d+\) with"

# An executor that ended by itself, and why, in the master's words.
EXECUTOR_ENDED = r"Executor updated: (\S+) is now (?:EXITED|FAILED) \((.*)\)"

# What follows a Python exception's message: an SQL state, an empty line or Java's stack.
END_OF_ERROR = r"\n(?:\s*SQLSTATE|\s*\n|\s+at )"

# A job whose application has ended, perhaps in a Connect server that still answers.
CONTEXT_STOPPED = r"stopped SparkContext|SparkContext was shut down"

# A Connect server's answer to all calls once its application has ended, and to others that it
# cannot handle.
SERVER_FAILED = r"Application error processing RPC"

# Spark has ended an application because too many of its executors failed.
TOO_MANY_EXECUTOR_FAILURES = r"Max number of executor failures"
