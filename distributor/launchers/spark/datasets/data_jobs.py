"""Runs the Spark jobs that prepare the datasets of a run, and waits for them."""

from __future__ import annotations

import queue
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distributor._compat import spark_texts
from distributor.control.cancellation import Cancellation
from distributor.errors import DistributorError
from distributor.spark.call_site import CallSite
from distributor.spark.session import Session
from distributor.spark.spark_job import SparkJob


@dataclass(frozen=True)
class DataJobs:
    """Runs the Spark jobs of one run that prepare its datasets.

    Parameters
    ----------
    session : Session
        The session of the DataFrames.
    run_id : str
        The run's id.
    call_site : CallSite
        The user's line that started the run.
    pool : str or None
        The fair scheduler's pool.
    cancellation : Cancellation
        Requests to end the run.
    """

    session: Session
    run_id: str
    call_site: CallSite
    pool: str | None
    cancellation: Cancellation

    def run(
        self,
        frame: Any,
        description: str,
        action: Callable[[Any], Any] = lambda frame: frame.collect(),
    ) -> Any:
        """Run a job, and return what `action` returns for the DataFrame; by default its rows."""
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with SparkJob(
            self.session,
            frame,
            f"{self.run_id}-data",
            ended.put,
            description=description,
            call_site=self.call_site,
            pool=self.pool,
            action=action,
        ) as job:
            self.cancellation.set_action(job.cancel)
            try:
                ending = ended.get()
            except BaseException:
                job.cancel()
                raise
            finally:
                self.cancellation.set_action(lambda: None)
        self.cancellation.check()
        if isinstance(ending, BaseException):
            found = re.search(spark_texts.FULL_DISK, str(ending))
            if found and not isinstance(ending, OSError):
                raise DistributorError(
                    f"{description}: a disk is full, to which Spark writes the rows (below "
                    f"spark.local.dir).\n{found.group(1)}"
                ) from ending
            raise ending
        return ending
