"""A job of Spark, on a thread of its own."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from types import FrameType
from typing import Any, TypeVar

from distributor._compat import pyspark as private
from distributor._compat.pyspark import CALL_SITE, CALL_SITE_DETAILS
from distributor.core.text import printable
from distributor.spark.application import end_of, no_warning
from distributor.spark.session import Session

T = TypeVar("T")

_PACKAGE, _COMMAND_LINE = "distributor", "distributor.cli"
_MAX_FRAMES = 20
"""Frames in the details: Spark's default for its own (``spark.callstack.depth``)."""


@dataclass(frozen=True)
class CallSite:
    """The line that started a run.

    Parameters
    ----------
    short : str
        File and line, such as ``train.py:42``.
    long : str
        The call stack, innermost call first.
    """

    short: str
    long: str

    @classmethod
    def of_caller(cls, program_name: str) -> CallSite:
        """Return the innermost line outside this package; for the command line, its program."""
        frames = list(islice(_callers(), _MAX_FRAMES))
        if not frames:
            return cls(program_name, f"distributor run {program_name}")
        lines = [f"{frame.f_code.co_name} at {_place(frame)}" for frame in frames]
        return cls(_place(frames[0]), "\n".join(lines))


def _callers() -> Iterator[FrameType]:
    """Yield the frames of the user's code, innermost first; none if the command line called."""
    frame = inspect.currentframe()
    is_inside = True
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if is_inside and module == _COMMAND_LINE:
            return
        is_inside = is_inside and module.partition(".")[0] == _PACKAGE
        if not is_inside:
            yield frame
        frame = frame.f_back


def _place(frame: FrameType) -> str:
    file = frame.f_code.co_filename
    if not file.startswith("<"):  # such as "<stdin>"
        file = os.path.basename(file) if os.path.exists(file) else "<cell>"
    return f"{file}:{frame.f_lineno}"


POOL = "spark.scheduler.pool"
END_SECONDS = 10.0
"""Seconds for a job to end by itself, and again once it is cancelled."""
CANCEL_SECONDS = 0.5
"""Seconds until a job that goes on is cancelled again: Spark may not have known it yet."""


@dataclass(eq=False, repr=False)
class SparkJob:
    """A job that is submitted on a thread of its own; a context manager that ends with the job.

    Parameters
    ----------
    session : Session
        The session.
    frame : DataFrame
        What the job computes.
    tag : str
        A tag that no other job has, by which this one is cancelled.
    on_end : callable
        Called once, on the job's thread, with the result or the exception that ended the job.
    description : str
        The job's name in Spark's UI, in the tabs for jobs and for SQL. Through Connect, the server
        chooses the description and the call site.
    call_site : CallSite
        The user's line that started the run.
    pool : str, optional
        The fair scheduler's pool.
    action : callable, optional
        Called on the job's thread with `frame`, to run the job; by default it collects the rows.
    """

    session: Session
    frame: Any
    tag: str
    on_end: Callable[[Any], object]
    _: KW_ONLY
    description: str
    call_site: CallSite
    pool: str | None = None
    action: Callable[[Any], Any] = lambda frame: frame.collect()

    def __post_init__(self) -> None:
        self._thread = self.session.thread(self._run)
        self._task_reported = False  # by a Connect server: a task has started
        self._reports_progress = self.session.is_connect and hasattr(
            self.session.spark, "registerProgressHandler"
        )

    def __enter__(self) -> SparkJob:
        self._thread.start()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.end(0 if error else END_SECONDS)

    def end(self, seconds: float = END_SECONDS) -> None:
        """Wait for the end of the job, and cancel it after so many seconds."""
        self._thread.join(seconds)
        deadline = time.monotonic() + END_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            self.cancel()
            self._thread.join(CANCEL_SECONDS)

    def cancel(self) -> None:
        """Cancel this job, and no other."""
        spark = self.session.spark
        try:
            if self.session.is_connect:
                spark.interruptTag(self.tag)
            else:
                spark.sparkContext.cancelJobsWithTag(self.tag)
        except Exception:
            if end_of(spark) is None:  # otherwise the job has ended with the application
                raise

    def has_begun(self) -> bool | None:
        """Return whether Spark has started a task of this job, whether or not it has ended.

        None if Spark does not report it. Through Connect it does since PySpark 4.
        """
        if self._reports_progress:
            return self._task_reported

        def started(context: Any, stages: set[int]) -> bool:
            infos = filter(None, map(context.statusTracker().getStageInfo, stages))
            return any(
                info.numActiveTasks + info.numCompletedTasks + info.numFailedTasks for info in infos
            )

        return self._ask(started)

    def barrier_arrivals(self) -> tuple[int, int] | None:
        """Return how many tasks of this job wait in a barrier, and how many barriers all passed.

        None if Spark does not report it, as through Connect.
        """
        return self._ask(private.barrier_arrivals)

    def failure_of(self, task: int) -> str | None:
        """Return why a task of this job has failed, by its id; empty as long as it has not.

        None if Spark does not report it, as through Connect.
        """
        return self._ask(lambda context, stages: private.task_failure(context, stages, task))

    def other_running_tasks(self) -> int:
        """Return how many tasks other jobs of this application run.

        0 if Spark does not report it, as through Connect.
        """

        def running(context: Any, stages: set[int]) -> int:
            tracker = context.statusTracker()
            others = set(tracker.getActiveStageIds()) - stages
            return sum(info.numActiveTasks for info in map(tracker.getStageInfo, others) if info)

        return self._ask(running) or 0

    def _ask(self, question: Callable[[Any, set[int]], T]) -> T | None:
        """Return what Spark answers about the stages of this job; None if it does not."""
        if self.session.is_connect:
            return None
        try:
            context = self.session.spark.sparkContext
            return question(context, private.stages_with_tag(context, self.tag))
        except Exception:
            return None  # the JVM has ended; the end of the job shows why

    def _note_progress(self, *, stages: Any, inflight_tasks: int, **_: object) -> None:
        """Take a Connect server's report, for which PySpark calls this on the job's own thread."""
        if threading.current_thread() is self._thread:
            ended = sum(stage.num_completed_tasks for stage in stages or ())
            self._task_reported |= inflight_tasks + ended > 0

    def _run(self) -> None:
        spark = self.session.spark
        try:
            with contextlib.ExitStack() as stack:
                if self.session.is_connect:
                    spark.addTag(self.tag)
                else:
                    self._label_jobs(spark.sparkContext)
                if self._reports_progress:
                    spark.registerProgressHandler(self._note_progress)
                    stack.callback(spark.removeProgressHandler, self._note_progress)
                stack.enter_context(no_warning())
                ending: Any = self.action(self.frame)
        except BaseException as error:
            ending = error
        self.on_end(ending)

    def _label_jobs(self, context: Any) -> None:
        """Have the jobs that this thread submits carry the tag, and be shown as this one."""
        context.addJobTag(self.tag)
        context.setJobDescription(printable(self.description))
        context.setLocalProperty(CALL_SITE, printable(self.call_site.short))
        context.setLocalProperty(CALL_SITE_DETAILS, printable(self.call_site.long))
        private.keep_call_site(self.frame)
        if self.pool is not None:
            context.setLocalProperty(POOL, self.pool)
