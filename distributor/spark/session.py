"""A Spark session, classic or Connect, as the launcher uses it."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import copy_context
from typing import Any

from distributor._compat import pyspark as private
from distributor.core.spelling import Message
from distributor.core.versions import require_spark
from distributor.errors import ApplicationEnded
from distributor.spark.application import JVM_ENDED, check_not_ended, no_warning


def refusal(template: str, **values: Any) -> RuntimeError:
    """Return an error with a `Message`, which names settings as the API of the user does."""
    return RuntimeError(Message(template, **values))


# Resources of executors, by the names of Spark's properties


_SIZE = re.compile(r"(\d+)([bkmgtp]?)b?")


def size_in_bytes(text: str, unit: str) -> int:
    """Return a size such as ``1g`` or ``512m`` in bytes."""
    if not (found := _SIZE.fullmatch(text.strip().lower())):
        raise ValueError(f"{text!r} is not a size, such as '1g'.")
    return int(found[1]) << 10 * "bkmgtp".index(found[2] or unit)


CORES, MEMORY = "spark.executor.cores", "spark.executor.memory"
OVERHEAD, OFF_HEAP = "spark.executor.memoryOverhead", "spark.memory.offHeap.size"
EXECUTOR_GPUS = "spark.executor.resource.gpu.amount"
DISCOVERY_SCRIPT = "spark.executor.resource.gpu.discoveryScript"
VENDOR = "spark.executor.resource.gpu.vendor"
TASK_CPUS, TASK_GPUS = "spark.task.cpus", "spark.task.resource.gpu.amount"
COUNTS = (CORES, EXECUTOR_GPUS, TASK_CPUS, TASK_GPUS)
SIZES = (MEMORY, OVERHEAD, OFF_HEAP)
NAMES = (*COUNTS, *SIZES, DISCOVERY_SCRIPT, VENDOR)


def check_executor_resources(name: str, resources: object) -> None:
    """Check that a mapping has names of properties that a resource profile can have, and values.

    Parameters
    ----------
    name : str
        The setting, for messages.
    resources : object
        The mapping, or None.
    """
    if resources is None:
        return
    if not isinstance(resources, Mapping):
        raise TypeError(f"{name} must be a mapping of Spark properties, but is {resources!r}.")
    for key, value in resources.items():
        if key not in NAMES:
            raise ValueError(
                f"{name} has {key!r}, which Spark cannot set for the executors of one run. It "
                f"takes {', '.join(NAMES)}."
            )
        text = str(value).strip().lower()
        if key in COUNTS and not (text.isdecimal() and int(text)):
            raise ValueError(f"{name}[{key!r}] must be a positive integer, but is {value!r}.")
        if key in SIZES and not ((size := _SIZE.fullmatch(text)) and int(size[1])):
            raise ValueError(f"{name}[{key!r}] must be a size such as '8g', but is {value!r}.")
        if not (isinstance(value, (str, int)) and text):
            raise ValueError(f"{name}[{key!r}] must have a value, but is {value!r}.")
    if TASK_GPUS in resources and EXECUTOR_GPUS not in resources:
        raise ValueError(f"{name} has {TASK_GPUS!r}, so it must have {EXECUTOR_GPUS!r}, too.")


def executor_requests(conf: Callable[[str], str | None]) -> Any:
    """Return the requests of a resource profile that properties describe.

    Parameters
    ----------
    conf : callable
        Returns the value of a property, or None.
    """
    from pyspark.resource import ExecutorResourceRequests

    requests = ExecutorResourceRequests()
    if cores := conf(CORES):
        requests.cores(int(cores))
    for key, request in (
        (MEMORY, requests.memory),
        (OVERHEAD, requests.memoryOverhead),
        (OFF_HEAP, requests.offheapMemory),
    ):
        if size := conf(key):
            unit = "b" if key == OFF_HEAP else "m"  # that Spark assumes if there is none
            request(f"{size_in_bytes(size, unit) // 2**20}m")
    if amount := conf(EXECUTOR_GPUS):
        script, vendor = conf(DISCOVERY_SCRIPT) or "", conf(VENDOR) or ""
        requests.resource("gpu", int(float(amount)), script, vendor)
    return requests


_PROFILES: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
# More than a usual cluster has slots. With fewer, some slots may have no partition: Spark's default
# number is better then.
MANY_PARTITIONS = 200


class Session:
    """Wraps a ``SparkSession``, and hides the differences between classic Spark and Connect.

    Parameters
    ----------
    spark : SparkSession
        The user's session. What is changed in it is restored.
    requested : mapping of str to str, optional
        Properties of executors that a run requests for itself. They take precedence.
    """

    _was_active = False
    """Whether this process has had an active session."""

    def __init__(self, spark: Any, requested: Mapping[str, str] | None = None) -> None:
        Session._was_active = True
        self.spark = spark
        self.requested = requested or {}
        self.is_connect = private.is_connect_session(spark)

    @classmethod
    def active(cls) -> Session | None:
        """Return the active session; None if there is none. PySpark is not imported for that."""
        if "pyspark.sql" not in sys.modules:
            return None
        from pyspark.sql import SparkSession

        try:
            spark = SparkSession.active()
        except Exception:  # 3.5 and 4 raise different types for "no session"
            return None
        return cls(spark)

    @classmethod
    def require_active(cls) -> Session:
        """Return the active session."""
        require_spark()
        session = cls.active()
        if session is None:
            if private.jvm_has_ended():
                raise ApplicationEnded(JVM_ENDED)
            stopped = ": its session has been stopped" if cls._was_active else ""
            raise refusal(
                "Distributed mode runs on the active Spark session, and there is "
                f"none{stopped}. "
                "Make one first (SparkSession.builder.getOrCreate()), or {run_here}."
            )
        check_not_ended(session.spark)
        return session

    @functools.cached_property
    def master(self) -> str:
        """The master's URL. It is read when first used, because a Connect server may have ended."""
        return self.conf("spark.master") or ""

    @property
    def is_local_master(self) -> bool:
        """Whether tasks run in the driver's JVM. ``local-cluster`` has executors of its own."""
        return self.master == "local" or self.master.startswith("local[")

    @property
    def is_one_machine(self) -> bool:
        """Whether executors certainly share the driver's disk and interpreter."""
        return self.master.startswith("local") and not self.is_connect

    @property
    def is_contained(self) -> bool:
        """Whether a cluster manager starts each executor in a container of its own size."""
        return self.master.startswith(("yarn", "k8s://"))

    @property
    def executor_cores(self) -> str | None:
        """How many cores each executor has; None for all cores of a standalone worker."""
        return self.conf(CORES) or ("1" if self.is_contained else None)  # Spark's default

    def owns(self, frame: Any) -> bool:
        """Return whether a DataFrame belongs to this session."""
        return private.is_same_session(frame.sparkSession, self.spark)

    def conf(self, key: str) -> str | None:
        """Return the value of a Spark property; None if it is unset."""
        value = self.requested.get(key) or self.spark.conf.get(key, None)
        return None if value is None else str(value)

    def has_conf(self, key: str) -> bool:
        """Return whether this version of Spark has a property, set or not."""
        try:
            self.spark.conf.get(key)
        except Exception:  # of another type in each kind of session
            return False
        return True

    def scheduler_conf(self, key: str) -> str | None:
        """Return the value of a Spark property at Spark's start, which is the scheduler's.

        It is None if the property was unset then, and through Connect, which does not say.
        """
        if self.is_connect:
            return None
        value: str | None = self.spark.sparkContext.getConf().get(key)
        return value

    def driver_gpu_addresses(self) -> list[str]:
        """Return the GPU addresses that Spark found for the driver; none through Connect."""
        if self.is_connect:
            return []
        gpus = self.spark.sparkContext.resources.get("gpu")
        return [] if gpus is None else list(gpus.addresses)

    @property
    def allocates_dynamically(self) -> bool:
        """Whether executors come and go with the load."""
        return (self.conf("spark.dynamicAllocation.enabled") or "false").lower() == "true"

    def supports_profiles(self) -> bool:
        """Return whether ``mapInArrow`` takes a resource profile (PySpark 4, here and there)."""
        import pyspark

        versions = pyspark.__version__, str(self.spark.version)
        return all(int(version.split(".")[0]) >= 4 for version in versions)

    def profile(self, gpus_per_task: int) -> Any:
        """Return the application's resource profile with so many GPUs for each task.

        None if the tasks need none: they have no GPUs, and run on the application's executors.
        """
        if not gpus_per_task and not self.requested:
            return None
        from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

        # Spark keeps every profile, so each is made once per application, not per session.
        application = self.spark if self.is_connect else self.spark.sparkContext
        profiles = _PROFILES.setdefault(application, {})
        key = gpus_per_task, *sorted(self.requested.items())
        if key not in profiles:
            tasks = TaskResourceRequests().cpus(int(self.conf("spark.task.cpus") or 1))
            if gpus_per_task:
                tasks.resource("gpu", gpus_per_task)
            builder = ResourceProfileBuilder().require(tasks)
            if self.requested or self.allocates_dynamically:  # executors are started for a profile
                builder.require(executor_requests(self.conf))
            profiles[key] = builder.build
        return profiles[key]

    def num_partitions(self, size: int, partition_size: int) -> int | None:
        """Return into how many partitions so many bytes are divided; None for Spark's default.

        It is the same number for each core, so that none waits for a last task of others.
        """
        parts = -(-int(size) // partition_size)
        if self.is_connect:  # which does not say how many tasks run at once
            return parts if parts > MANY_PARTITIONS else None
        cores = int(self.spark.sparkContext.defaultParallelism)
        return max(1, -(-parts // cores)) * cores

    def why_no_pools(self) -> str | None:
        """Return why jobs cannot use a pool of the fair scheduler; None if they can."""
        if self.is_connect:
            return "through Spark Connect no job can be put into a pool"
        if (self.conf("spark.scheduler.mode") or "FIFO").upper() != "FAIR":
            return (
                "'spark.scheduler.mode' is not 'FAIR': make the session with that, and with "
                "'spark.scheduler.allocation.file' (conf/fairscheduler.xml)"
            )
        return None

    def thread(self, target: Callable[[], object]) -> threading.Thread:
        """Return a thread that inherits the calling thread's tags, pool and job group of Spark."""
        from pyspark import InheritableThread

        options = {"session": self.spark} if self.is_connect else {}
        context = copy_context()
        thread: threading.Thread = InheritableThread(
            target=lambda: context.run(target), daemon=True, **options
        )
        return thread

    def map_in_arrow(self, frame: Any, task: Any, schema: Any, **options: Any) -> Any:
        """Plan a job; nothing is submitted yet."""
        with self._driver_python(), no_warning():
            return frame.mapInArrow(task, schema, **options)

    def data_frame(self, rows: list[Any], schema: str) -> Any:
        """Return a DataFrame of rows, for which some versions of Spark start Python workers."""
        with self._driver_python(), no_warning():
            return self.spark.createDataFrame(rows, schema)

    def column_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a user-defined function whose first use plans it, as `map_in_arrow` does."""

        @functools.wraps(function)  # with the attributes that spark.udf.register needs
        def planned(*columns: Any, **named: Any) -> Any:
            with self._driver_python(), no_warning():
                return function(*columns, **named)

        return planned

    @contextlib.contextmanager
    def _driver_python(self) -> Iterator[None]:
        """Have the function's workers use the driver's interpreter if it certainly is right.

        Without PYSPARK_PYTHON, a PySpark that pip installed runs the system's ``python3``. Beside
        a virtual environment that is another interpreter, without torch.
        """
        if not self.is_one_machine or "PYSPARK_PYTHON" in os.environ:
            yield
            return
        with private.python_executable(self.spark.sparkContext, sys.executable):
            yield
