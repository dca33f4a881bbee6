"""The executors of an application: how many tasks they can run, and how much they can return."""

from __future__ import annotations

import re
import weakref
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from distributor._compat import pyspark as private
from distributor.screen.one_time_warnings import warn_once
from distributor.spark.application_end import end_of
from distributor.spark.executor_resources import EXECUTOR_GPUS
from distributor.spark.session import Session
from distributor.spark.sizes import size_in_bytes

MAX_EXECUTORS = "spark.dynamicAllocation.maxExecutors"
HEAP_SHARE = 4
"""A job's rows may take one part in so many of a heap."""

_HOSTS: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()
"""The hosts of an application's executors, by their ids."""


@dataclass(frozen=True)
class Executors:
    """The executors of a session's application.

    A Spark Connect client does not know them: each method says what it returns then.

    Parameters
    ----------
    session : Session
        The session.
    """

    session: Session

    def count(self) -> int:
        """Return how many executors can take tasks; 0 through Connect.

        Spark still knows executors that are lost while it waits for the reason.
        """
        if self.session.is_connect or self.session.is_local_master:
            return 0
        context = self.session.spark.sparkContext
        ids = private.executor_ids(context)
        return len(ids) - len(private.inactive_executors(context, ids))

    def hosts(self) -> set[str]:
        """Return the hosts of the executors, without the driver's; none through Connect."""
        if self.session.is_connect:
            return set()
        hosts = private.executor_hosts(self.session.spark.sparkContext)
        return set(hosts) - {self.session.conf("spark.driver.host")}

    def leaving(self, hosts: Container[str] | None) -> dict[str, str]:
        """Return the executors that Spark is about to end, and their hosts (none by Connect)."""
        if self.session.is_connect or self.session.is_local_master:
            return {}
        try:
            context = self.session.spark.sparkContext
            host_of = _HOSTS.setdefault(context, {})
            ids = private.executor_ids(context)
            for executor in ids:
                if not host_of.get(executor):
                    host_of[executor] = private.executor_host(context, executor)
            on_hosts = [each for each in ids if hosts is None or host_of[each] in hosts]
            inactive = private.inactive_executors(context, on_hosts)
            return {each: host_of[each] for each in inactive}
        except Exception as error:
            if end_of(self.session.spark) is None:  # otherwise the end of the job shows why
                warn_once(
                    "Spark does not answer which executors it is about to end, so that ranks are "
                    f"not notified of it ({type(error).__name__})."
                )
            return {}

    def slots(self, profile: Any = None) -> int | None:
        """Return how many tasks the registered executors can run at once; None through Connect."""
        if self.session.is_connect:
            return None
        return private.max_concurrent_tasks(self.session.spark.sparkContext, profile)

    def max_slots(self, gpus_per_task: int = 0) -> int | None:
        """Return how many tasks the application can ever run at once by its configuration.

        None if that depends on the cluster. The GPUs are those of tasks of a resource profile.
        """
        conf, master = self.session.conf, self.session.master
        if self.session.is_local_master:
            return self.slots()
        cpus = int(conf("spark.task.cpus") or 1)
        limits = []
        if found := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]", master):
            limits.append(int(found[1]) * (int(found[2]) // cpus))
        if master.startswith("spark://") and (max_cores := conf("spark.cores.max")):
            limits.append(int(max_cores) // cpus)
        is_contained = master.startswith(("yarn", "k8s://"))
        cores = conf("spark.executor.cores") or ("1" if is_contained else None)  # Spark's default
        count = self._max_executors(is_contained=is_contained)
        if cores is not None and count is not None:
            each = int(cores) // cpus
            if gpus_per_task:
                each = min(each, int(float(conf(EXECUTOR_GPUS) or 0)) // gpus_per_task)
            limits.append(count * each)
        return min(limits, default=None)

    def _max_executors(self, *, is_contained: bool) -> int | None:
        if self.session.allocates_dynamically:
            most = self.session.conf(MAX_EXECUTORS)
            return None if most is None else int(most)
        if is_contained:
            return int(self.session.conf("spark.executor.instances") or 2)  # Spark's default
        return None

    def max_result_bytes(self) -> int:
        """Return how many bytes a job can return to the driver as rows.

        Spark refuses more than ``spark.driver.maxResultSize``. With small heaps it runs out of
        memory long before, because both ends hold a task's rows several times over.
        """
        conf = self.session.conf
        keys = ("spark.driver.memory", "spark.executor.memory")
        heaps = [size_in_bytes(conf(key) or "1g", "m") // HEAP_SHARE for key in keys]
        limit = size_in_bytes(conf("spark.driver.maxResultSize") or "1g", "b")
        return min(heaps + ([limit] if limit else []))  # 0 means no limit
