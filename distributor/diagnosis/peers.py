"""The tasks of an examination as each of them sees the others."""

from __future__ import annotations

from typing import Any, Protocol

from distributor.diagnosis.network import attend
from distributor.launchers.spark.task.spark_node import Placement, own_executor

ARRIVAL_SECONDS = 40.0
"""Seconds from the first task of an ordinary job to the last that takes part."""
ROUND_SECONDS = 20.0
"""Seconds for the tasks that take part to come to a further exchange."""


class Peers(Protocol):
    """The tasks that take part, for one of them."""

    placement: Placement
    """Where they are."""
    error: str
    """Why the driver did not answer this task; empty if it did, or was not asked."""

    def gather(self, text: str) -> list[str]:
        """Wait for all, and return the text of each; empty for a task that did not come."""


class BarrierPeers:
    """The tasks of a barrier stage, which exchange texts through Spark."""

    def __init__(self) -> None:
        from pyspark import BarrierTaskContext

        self._context: Any = BarrierTaskContext.get()
        self.placement = Placement.in_stage(self._context)
        self.error = ""

    def gather(self, text: str) -> list[str]:
        return list(self._context.allGather(text))


class DriverPeers:
    """The tasks of an ordinary job, which exchange texts through the driver.

    A task that does not reach the driver is alone.

    Parameters
    ----------
    driver : tuple of str and int
        Where the driver's `ProbeServer` listens.
    token : bytes
        What it accepts.
    task : int
        The index of this task.
    executor : str
        Its executor, as its host, a colon, and its name there.
    seconds : float
        How long to wait for the tasks that Spark has yet to start.

    Raises
    ------
    LookupError
        If the others have begun without this task.
    """

    def __init__(
        self,
        driver: tuple[str, int],
        token: bytes,
        task: int,
        executor: str,
        seconds: float = ARRIVAL_SECONDS,
    ) -> None:
        self._driver, self._token, self._task = driver, token, task
        self._num_rounds = 0
        self.error = ""
        found = self._attend(executor, seconds)
        if self.error:
            found = {task: executor}
        if task not in found:
            raise LookupError(f"The others have begun without task {task}.")
        self._tasks = sorted(found)
        executors = [found[each] for each in self._tasks]
        self.placement = Placement(executors, self._tasks.index(task))

    @classmethod
    def of_this_task(cls, driver: tuple[str, int], token: bytes) -> DriverPeers:
        """Find the others of the task of Spark that runs in this process."""
        from pyspark import TaskContext

        context: Any = TaskContext.get()
        return cls(driver, token, context.partitionId(), own_executor(driver[0]))

    def gather(self, text: str) -> list[str]:
        found = {} if self.error else self._attend(text, ROUND_SECONDS)
        return [found.get(each, "") for each in self._tasks]

    def _attend(self, text: str, seconds: float) -> dict[int, str]:
        number, self._num_rounds = self._num_rounds, self._num_rounds + 1
        try:
            return attend(self._driver, self._token, number, self._task, text, seconds)
        except OSError as error:
            self.error = str(error)
            return {}
