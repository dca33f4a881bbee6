"""Communication through Spark alone: an exchange at the start, a barrier at the end, and rows."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from distributor.core.versions import Software
from distributor.node.agent.agent import Agent
from distributor.node.agent.failure_grace import AFTER_COLLATERAL_SECONDS
from distributor.node.agent.listener import BaseAgentListener
from distributor.node.agent.output.log_files import LogFiles
from distributor.node.spark_task.channel import Delivery
from distributor.node.spark_task.executor_log import ExecutorLog
from distributor.node.spark_task.node_state import NodeEvent, NodeLifecycle
from distributor.node.spark_task.rendezvous import exchange_through_spark
from distributor.node.spark_task.result_rows import UnsentReports
from distributor.node.spark_task.task_spec import TaskSpec
from distributor.serialization.outcome import Failure, Value
from distributor.wire.messages import (
    NodeWarning,
    Output,
    ProgramRelay,
    ProgramStored,
    ProgramWanted,
    Rendezvous,
    Source,
)

CANCELLATION_SECONDS = 5.0
"""Seconds within which Spark ends the Python worker of a task that it has cancelled.

A worker that is ended while it waits in ``allGather`` takes its whole executor along (exit code 50,
seen in PySpark 4.3), with everything else that runs there. If the driver has ended the run, its hub
cannot be reached, so a node that finds no hub first waits to see whether Spark ends its task.
"""
DRIVER_FIRST_SECONDS = 4.0
"""Seconds past a deadline that a node without a link leaves to the driver, if others have a link.

The driver asks the other nodes for the stacks of their ranks. That is no longer possible once this
node's task has failed, because Spark then ends all tasks.
"""


class SparkChannel(BaseAgentListener):
    """The channel of a node that has no link to the driver.

    Failures reach the driver inside the exception that ends the task. Output goes to the node's own
    ``log_dir``, or to the executor's log if there is none, and is not shown. The driver cannot ask
    for stacks, nor stop the ranks other than by ending the task, and preemption notices do not
    reach other nodes.

    Parameters
    ----------
    spec : TaskSpec
        What the driver passed to the task.
    context : BarrierTaskContext
        Spark's context of the task.
    lifecycle : NodeLifecycle
        The state of the node.
    """

    head_start = 0.0

    def __init__(self, spec: TaskSpec, context: Any, lifecycle: NodeLifecycle) -> None:
        self.deadline_slack = 0.0
        self.unsent_reports = UnsentReports()
        self._context = context
        self._lifecycle = lifecycle
        self._agent: Agent | None = None
        self._log = (
            LogFiles(spec.log_dir, spec.run_id, spec.attempt) if spec.log_dir else ExecutorLog()
        )
        self._last_barrier = threading.Thread(target=self._await_all_nodes, daemon=True)

    def __enter__(self) -> SparkChannel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._log.close()

    def attach(self, agent: Agent) -> None:
        self._agent = agent

    def exchange_rendezvous(
        self, own: Rendezvous | None, software: Software, warnings: Sequence[NodeWarning]
    ) -> Rendezvous:
        for warning in warnings:
            print(f"distributor: {warning.text} {warning.detail}", file=sys.stderr)
        time.sleep(CANCELLATION_SECONDS)
        return self.exchange_now(own, software)

    def exchange_now(
        self, own: Rendezvous | None, software: Software, *, has_link: bool = False
    ) -> Rendezvous:
        """Exchange at once, because the driver asked for it and so has not cancelled this task."""
        found = exchange_through_spark(self._context, own, software, has_link=has_link)
        if found.some_have_link:
            self.deadline_slack = DRIVER_FIRST_SECONDS
        return found.store

    def find_program(self, wanted: ProgramWanted) -> None:
        """Find no source: nodes without a link receive programs through Spark."""

    def send(self, message: ProgramRelay | ProgramStored) -> None:
        """Report nothing: no node without a link receives a program."""

    def on_rank_failed(self, failure: Failure) -> None:
        self._lifecycle.fire(NodeEvent.RANK_FAILED)

    def await_verdict(self, failures: Sequence[Failure]) -> bool:
        if failures and all(failure.collateral for failure in failures):
            time.sleep(AFTER_COLLATERAL_SECONDS)  # the task that has the cause may end this one
        return True

    def on_work_done(self) -> None:
        self._lifecycle.fire(NodeEvent.WORK_DONE)
        self.start_last_barrier()

    def start_last_barrier(self) -> None:
        """Release rank 0 once all nodes have come here."""
        self._last_barrier.start()

    def _await_all_nodes(self) -> None:
        self._context.barrier()
        if self._agent:
            self._agent.release()

    def deliver(self, values: Sequence[Value]) -> Delivery:
        """Send no value: the task's rows carry all of them."""
        self._last_barrier.join()
        return Delivery()

    def write(self, rank: int, source: Source, data: bytes) -> None:
        if source == "stdout" or source == "stderr":
            self._log.write(rank, source, data)
        else:
            self.unsent_reports.add(Output(rank, source, data))

    def has_room(self) -> bool:
        return True
