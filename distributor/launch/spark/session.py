"""A Spark session, classic or Connect, as the launcher uses it; all differences are here."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

from distributor._compat import pyspark as private
from distributor.core.resources import format_bytes
from distributor.launch.call_site import CallSite
from distributor.launch.output.messages import notify
from distributor.launch.spark.log_quieting import no_warning

_SHIP = threading.Lock()
_SHIPPED: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
_HOSTS: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()
"""The hosts of an application's executors, by their ids."""
_PROFILES: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()


class Session:
    """Wraps a ``SparkSession``.

    Parameters
    ----------
    spark : SparkSession
        The user's session; nothing of it is changed for good.
    """

    def __init__(self, spark: Any) -> None:
        self.spark = spark
        self.is_connect = private.is_connect_session(spark)

    @classmethod
    def active(cls) -> Session | None:
        """Give the active session; None where there is none, without importing PySpark."""
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

    @functools.cached_property
    def master(self) -> str:
        """The master's URL; asked for when it is wanted, for a Connect server may have gone."""
        return self.conf("spark.master") or ""

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
        """Give the application's resource profile with so many GPUs for each task."""
        from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

        # Spark keeps each that it is given; several sessions may share one application.
        application = self.spark if self.is_connect else self.spark.sparkContext
        profiles = _PROFILES.setdefault(application, {})
        if gpus_per_task in profiles:
            return profiles[gpus_per_task]
        cpus = int(self.conf("spark.task.cpus") or 1)
        requests = TaskResourceRequests().cpus(cpus).resource("gpu", gpus_per_task)
        profiles[gpus_per_task] = ResourceProfileBuilder().require(requests).build
        return profiles[gpus_per_task]

    def slots(self, profile: Any = None) -> int | None:
        """Count the tasks that the executors registered by now can run at once.

        None through Connect, which does not tell.
        """
        if self.is_connect:
            return None
        return private.max_concurrent_tasks(self.spark.sparkContext, profile)

    def executors(self) -> int:
        """Count the executors that have registered; 0 through Connect, which does not tell."""
        if self.is_connect:
            return 0
        return len(private.executor_hosts(self.spark.sparkContext)) - 1  # the driver is among them

    def executor_hosts(self) -> set[str]:
        """List the executors' hosts, less the driver's; none through Connect."""
        if self.is_connect:
            return set()
        hosts = private.executor_hosts(self.spark.sparkContext)
        return set(hosts) - {self.conf("spark.driver.host")}

    def leaving_executors(self, hosts: Container[str] | None) -> set[str]:
        """Give the ids of executors that Spark is about to end; Connect tells of none.

        Parameters
        ----------
        hosts : container of str or None
            Where they are; None for anywhere.
        """
        if self.is_connect or self.is_local_master:
            return set()
        try:
            context = self.spark.sparkContext
            known = _HOSTS.setdefault(context, {})
            there = private.executor_ids(context)
            for each in there:
                if each not in known:
                    known[each] = private.executor_host(context, each)
            ours = [each for each in there if hosts is None or known[each] in hosts]
            return {each for each in ours if not private.is_executor_active(context, each)}
        except Exception:
            return set()  # the JVM has gone; how, is told by the end of the job

    def most_slots(self) -> int | None:
        """Count the tasks that the application can ever run at once, as far as it is configured.

        None where that depends on the cluster.
        """
        if self.is_local_master:
            return self.slots()
        cpus = int(self.conf("spark.task.cpus") or 1)
        cores = self.conf("spark.executor.cores")
        if found := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]", self.master):
            return int(found[1]) * (int(found[2]) // cpus)
        if self.master.startswith("spark://") and (most := self.conf("spark.cores.max")):
            return int(most) // cpus
        executors = self.conf("spark.executor.instances")
        if self.master.startswith(("yarn", "k8s://")) and cores and executors:
            return int(executors) * (int(cores) // cpus)
        return None

    def most_result_bytes(self) -> int:
        """Tell how much a job may bring to the driver as rows.

        Spark refuses what is beyond ``spark.driver.maxResultSize``; long before it runs out of
        memory where heaps are small: both ends hold a task's rows several times over.
        """
        keys = ("spark.driver.memory", "spark.executor.memory")
        heaps = [size_in_bytes(self.conf(key) or "1g", "m") // HEAP_SHARE for key in keys]
        most = size_in_bytes(self.conf("spark.driver.maxResultSize") or "1g", "b")
        return min(heaps + ([most] if most else []))

    def ship(self, name: str, write: Callable[[Path], object]) -> None:
        """Give every executor a file, once per session.

        Parameters
        ----------
        name : str
            Its name in ``SparkFiles``.
        write : callable
            Writes the file to the path given.
        """
        with self._first_time(name) as folder:
            if folder is None:
                return
            path = folder / name
            write(path)
            if self.is_connect:
                self.spark.addArtifacts(str(path), file=True)
            else:
                self.spark.sparkContext.addFile(str(path))

    def ship_archive(self, name: str, archive: Path) -> None:
        """Give every executor what is in an archive, once per session.

        Parameters
        ----------
        name : str
            The folder in ``SparkFiles`` that Spark unpacks it to.
        archive : Path
            The archive, of a kind that Spark knows by its suffix.
        """
        with self._first_time(name) as folder:
            if folder is None:
                return
            size = format_bytes(archive.stat().st_size)
            notify(f"Spark brings {archive.name} ({size}) to the executors, once per session.")
            # By a name of its own: Spark takes no two files of one name from different folders.
            suffix = ".tar.gz" if archive.name.endswith(".tar.gz") else archive.suffix
            link = folder / f"{name}{suffix}"
            link.unlink(missing_ok=True)  # of an attempt that failed
            link.symlink_to(archive)
            if self.is_connect:
                self.spark.addArtifacts(f"{link}#{name}", archive=True)
            else:
                self.spark.sparkContext.addArchive(f"{link}#{name}")

    @contextlib.contextmanager
    def _first_time(self, name: str) -> Iterator[Path | None]:
        """Give a folder from which Spark can take what has this name; None where it did before."""
        import tempfile

        with _SHIP:  # of runs that begin at the same time one ships, and the others wait
            shipped = _SHIPPED.setdefault(self.spark, set())
            if name in shipped:
                yield None
            elif self.is_connect:
                with tempfile.TemporaryDirectory() as folder:
                    yield Path(folder)
            else:
                # Spark serves files from where they lie, and removes this folder when it stops.
                yield Path(private.temporary_folder(self.spark.sparkContext))
            shipped.add(name)

    def why_no_pools(self) -> str | None:
        """Say why no job can be put into a pool of the fair scheduler; None where it can."""
        if self.is_connect:
            return "through Spark Connect no job can be put into a pool"
        if (self.conf("spark.scheduler.mode") or "FIFO").upper() != "FAIR":
            return (
                "'spark.scheduler.mode' is not 'FAIR': make the session with that, and with "
                "'spark.scheduler.allocation.file' (conf/fairscheduler.xml)"
            )
        return None

    def thread(self, target: Callable[[], object]) -> threading.Thread:
        """Make a thread that is to Spark as the calling one: its tags, pool and job group."""
        from pyspark import InheritableThread

        options = {"session": self.spark} if self.is_connect else {}
        thread: threading.Thread = InheritableThread(target=target, daemon=True, **options)
        return thread

    def barrier_frame(self, task: Any, num_tasks: int, schema: str, profile: Any = None) -> Any:
        """Plan a barrier job of `num_tasks` tasks that run `task`; nothing is submitted yet."""
        options = {} if profile is None else {"profile": profile}
        with self._drivers_python(), no_warning():
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
        with private.python_executable(self.spark.sparkContext, sys.executable):
            yield


def size_in_bytes(text: str, unit: str) -> int:
    """Read one of Spark's sizes, in this unit if it names none."""
    found = re.fullmatch(r"(\d+)([bkmgtp]?)b?", text.strip().lower())
    if not found:
        raise ValueError(f"{text!r} is no size, such as '1g'")
    return int(found[1]) << 10 * "bkmgtp".index(found[2] or unit)


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
    description : str
        What Spark's UI calls it, in its tabs for jobs and for SQL.
    call_site : CallSite
        The user's line that started it. Through Connect, the server chooses description and call
        site.
    pool : str, optional
        The fair scheduler's pool.
    """

    def __init__(
        self,
        session: Session,
        frame: Any,
        tag: str,
        on_end: Callable[[list[Any] | BaseException], object],
        *,
        description: str,
        call_site: CallSite,
        pool: str | None = None,
    ) -> None:
        self._session = session
        self._frame = frame
        self._tag = tag
        self._on_end = on_end
        self._description = description
        self._call_site = call_site
        self._pool = pool
        self._reported = False  # whether a task has started, as a Connect server reports
        self._thread = session.thread(self._collect)

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

    def has_begun(self) -> bool | None:
        """Return whether Spark has started a task of this job, be it one that has ended.

        None if Spark does not tell: through Connect it does so since PySpark 4.
        """
        if self._session.is_connect:
            return self._reported if self._reports else None
        try:
            return self._has_begun_in(self._session.spark.sparkContext)
        except Exception:
            return None  # the JVM has gone; how, is told by the end of the job

    def _has_begun_in(self, context: Any) -> bool:
        stages = map(context.statusTracker().getStageInfo, self._stages_in(context))
        return any(
            stage.numActiveTasks + stage.numCompletedTasks + stage.numFailedTasks
            for stage in stages
            if stage
        )

    def other_running_tasks(self) -> int:
        """Count the tasks that other jobs of this application run.

        0 if Spark does not tell, as through Connect.
        """
        if self._session.is_connect:
            return 0
        try:
            context = self._session.spark.sparkContext
            tracker, own = context.statusTracker(), self._stages_in(context)
            others = (stage for stage in tracker.getActiveStageIds() if stage not in own)
            return sum(
                info.numActiveTasks for stage in others if (info := tracker.getStageInfo(stage))
            )
        except Exception:
            return 0  # as above

    def _stages_in(self, context: Any) -> set[int]:
        jobs = private.jobs_with_tag(context, self._tag)
        infos = map(context.statusTracker().getJobInfo, jobs)
        return {stage for info in infos if info for stage in info.stageIds}

    @property
    def _reports(self) -> bool:
        return hasattr(self._session.spark, "registerProgressHandler")

    def _note_progress(self, *, stages: Any, inflight_tasks: int, **_: object) -> None:
        """Take a Connect server's report, which PySpark hands over on the job's own thread."""
        if threading.current_thread() is self._thread:
            ended = sum(stage.num_completed_tasks for stage in stages or ())
            self._reported |= inflight_tasks + ended > 0

    @contextlib.contextmanager
    def _noting_progress(self) -> Iterator[None]:
        spark = self._session.spark
        if not (self._session.is_connect and self._reports):
            yield
            return
        spark.registerProgressHandler(self._note_progress)
        try:
            yield
        finally:
            spark.removeProgressHandler(self._note_progress)

    def _collect(self) -> None:
        spark = self._session.spark
        tagger = spark.addTag if self._session.is_connect else spark.sparkContext.addJobTag
        try:
            tagger(self._tag)
            if not self._session.is_connect:
                spark.sparkContext.setJobDescription(self._description)
                self._call_site.set_on(spark.sparkContext)
                private.keep_call_site(self._frame)
            if self._pool is not None:
                spark.sparkContext.setLocalProperty(POOL, self._pool)
            with no_warning(), self._noting_progress():
                ending: list[Any] | BaseException = self._frame.collect()
        except BaseException as error:
            ending = error
        self._on_end(ending)


POOL = "spark.scheduler.pool"
HEAP_SHARE = 4
"""The part of a heap that a job's rows may take."""
_END_SECONDS = 10.0
"""Seconds for a job to end by itself, and again once it is cancelled."""
