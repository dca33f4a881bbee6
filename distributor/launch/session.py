"""A Spark session, classic or Connect, as the launcher needs it. All that differs is here."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_SWAP = threading.Lock()
_SHIPPED: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


class Session:
    """Wraps a ``SparkSession``.

    Parameters
    ----------
    spark : SparkSession
        The user's session; nothing of it is changed for good.
    """

    def __init__(self, spark: Any) -> None:
        self.spark = spark
        self.is_connect = type(spark).__module__.startswith("pyspark.sql.connect")
        self.master = self.conf("spark.master") or ""

    @classmethod
    def active(cls) -> Session | None:
        """Give the active session; None where there is none, without importing PySpark."""
        if "pyspark.sql" not in sys.modules:
            return None
        from pyspark.sql import SparkSession

        try:
            return cls(SparkSession.active())
        except Exception:  # 3.5 and 4 raise different types for "no session"
            return None

    @classmethod
    def require_active(cls) -> Session:
        """Give the active session.

        Raises
        ------
        RuntimeError
            Where there is none.
        """
        session = cls.active()
        if session is None:
            raise RuntimeError(
                "Distributed mode runs on the active Spark session, and there is none. Make one "
                "first (SparkSession.builder.getOrCreate()), or pass local_mode=True."
            )
        return session

    @property
    def is_local_master(self) -> bool:
        """Whether tasks run in the driver's JVM; ``local-cluster`` has executors of its own."""
        return self.master == "local" or self.master.startswith("local[")

    @property
    def is_one_machine(self) -> bool:
        """Whether executors certainly share the driver's disk and interpreter."""
        return self.master.startswith("local") and not self.is_connect

    def conf(self, key: str) -> str | None:
        """Give a configuration value; None where it is unset."""
        value = self.spark.conf.get(key, None)
        return None if value is None else str(value)

    def driver_gpu_addresses(self) -> list[str]:
        """List the GPU addresses that Spark found for the driver; a Connect client has none."""
        if self.is_connect:
            return []
        gpus = self.spark.sparkContext.resources.get("gpu")
        return [] if gpus is None else list(gpus.addresses)

    @property
    def allocates_dynamically(self) -> bool:
        """Whether executors come and go with the load."""
        return (self.conf("spark.dynamicAllocation.enabled") or "false").lower() == "true"

    def supports_profiles(self) -> bool:
        """Tell whether ``mapInArrow`` takes a resource profile (PySpark 4)."""
        import pyspark

        return int(pyspark.__version__.split(".")[0]) >= 4

    def gpu_profile(self, gpus_per_task: int) -> Any:
        """Build a resource profile with GPUs for each task."""
        from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

        cpus = int(self.conf("spark.task.cpus") or 1)
        requests = TaskResourceRequests().cpus(cpus).resource("gpu", gpus_per_task)
        return ResourceProfileBuilder().require(requests).build

    def slots(self, profile: Any = None) -> int | None:
        """Count the tasks that the executors registered by now can run at once.

        None through Connect, which does not tell.
        """
        if self.is_connect:
            return None
        context = self.spark.sparkContext._jsc.sc()
        manager = context.resourceProfileManager()
        if profile is None:
            return int(context.maxNumConcurrentTasks(manager.defaultResourceProfile()))
        requested = profile._java_resource_profile
        manager.addResourceProfile(requested)
        return int(context.maxNumConcurrentTasks(requested))

    def ship(self, name: str, write: Callable[[Path], object]) -> None:
        """Give every executor a file, once per session.

        Parameters
        ----------
        name : str
            Its name in ``SparkFiles``.
        write : callable
            Writes the file to the path given.
        """
        import tempfile

        shipped = _SHIPPED.setdefault(self.spark, set())
        if name in shipped:
            return
        if self.is_connect:
            with tempfile.TemporaryDirectory() as folder:
                write(Path(folder, name))
                self.spark.addArtifacts(str(Path(folder, name)), file=True)
        else:
            # Spark serves the file from where it lies, and removes this folder when it stops.
            path = Path(self.spark.sparkContext._temp_dir, name)
            write(path)
            self.spark.sparkContext.addFile(str(path))
        shipped.add(name)

    def barrier_frame(self, task: Any, num_tasks: int, schema: str, profile: Any = None) -> Any:
        """Plan a barrier job of `num_tasks` tasks that run `task`; nothing is submitted yet."""
        options = {} if profile is None else {"profile": profile}
        with self._drivers_python():
            return self.spark.range(0, num_tasks, 1, num_tasks).mapInArrow(
                task, schema, barrier=True, **options
            )

    @contextlib.contextmanager
    def _drivers_python(self) -> Iterator[None]:
        """Have the function's workers run the driver's interpreter, where that is surely right.

        Without PYSPARK_PYTHON a pip PySpark runs the system's ``python3``, which in a virtual
        environment is another one, without torch.
        """
        if not self.is_one_machine or "PYSPARK_PYTHON" in os.environ:
            yield
            return
        context = self.spark.sparkContext
        with _SWAP:
            usual, context.pythonExec = context.pythonExec, sys.executable
            try:
                yield
            finally:
                context.pythonExec = usual


class BarrierJob:
    """A submitted job on a thread of its own; a context manager that leaves none running.

    Parameters
    ----------
    session : Session
        Where it runs.
    frame : DataFrame
        The planned job.
    tag : str
        Names this job and no other, for cancelling.
    on_end : callable
        Called once on the job's thread with its rows, or with the exception that ended it.
    """

    def __init__(
        self,
        session: Session,
        frame: Any,
        tag: str,
        on_end: Callable[[list[Any] | BaseException], object],
    ) -> None:
        from pyspark import InheritableThread

        self._session = session
        self._frame = frame
        self._tag = tag
        self._on_end = on_end
        options = {"session": session.spark} if session.is_connect else {}
        self._thread = InheritableThread(target=self._collect, daemon=True, **options)

    def __enter__(self) -> BarrierJob:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            self.cancel()
            self._thread.join(_END_SECONDS)

    def cancel(self) -> None:
        """Cancel this job; no other is touched."""
        spark = self._session.spark
        if self._session.is_connect:
            spark.interruptTag(self._tag)
        else:
            spark.sparkContext.cancelJobsWithTag(self._tag)

    def _collect(self) -> None:
        spark = self._session.spark
        tagger = spark.addTag if self._session.is_connect else spark.sparkContext.addJobTag
        try:
            tagger(self._tag)
            ending: list[Any] | BaseException = self._frame.collect()
        except BaseException as error:
            ending = error
        self._on_end(ending)


_END_SECONDS = 10.0
"""Seconds for a job to end by itself, and again once it is cancelled."""
