"""What Spark does for a node without a link: an exchange, a barrier, and the rows of its task."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict
from typing import Any

from distributor.core.versions import Software, check_alike
from distributor.errors import StartTimeout
from distributor.launchers.spark.task.result_rows import UnsentReports
from distributor.launchers.spark.task.spark_node import Placement
from distributor.launchers.spark.task.task_spec import TaskSpec
from distributor.node.agent.output import LogFiles
from distributor.wire.messages import NodeWarning, Output, Rendezvous, Source, Stream

CANCELLATION_SECONDS = 5.0
"""Seconds within which Spark ends the Python worker of a task that it has cancelled.

A worker that is ended while it waits in ``allGather`` takes its whole executor along (exit code 50,
seen in PySpark 4.3), with everything else that runs there. If the driver has ended the run, its hub
cannot be reached, so a node that finds no hub first waits to see whether Spark ends its task.
"""


class SparkDetour:
    """Connects a node without a link to the other nodes and the driver through Spark.

    Output goes to the node's own ``log_dir``, or to the executor's log if there is none, and is not
    shown. Values, failures and reports reach the driver with the end of the task. The driver cannot
    ask for stacks, nor stop the ranks other than by ending the task, and preemption notices do not
    reach other nodes.

    Parameters
    ----------
    spec : TaskSpec
        What the driver passed to the task.
    context : BarrierTaskContext
        Spark's context of the task.
    """

    def __init__(self, spec: TaskSpec, context: Any) -> None:
        self.unsent_reports = UnsentReports()
        self._context = context
        share = spec.share
        self._log: LogFiles | ExecutorLog = (
            LogFiles(spec.log_dir, share.run_id, share.attempt) if spec.log_dir else ExecutorLog()
        )
        self._last_barrier: threading.Thread | None = None

    def __enter__(self) -> SparkDetour:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._log.close()

    def exchange(
        self,
        own: Rendezvous | None,
        software: Software,
        warnings: Sequence[NodeWarning],
        deadline: float,
    ) -> Rendezvous:
        """Exchange addresses and versions by ``allGather``, which takes Spark about a second."""
        for warning in warnings:
            print(f"distributor: {warning.text} {warning.detail}", file=sys.stderr)
        time.sleep(CANCELLATION_SECONDS)
        report = {"store": asdict(own) if own else None, "software": dict(software)}
        gathered = self._all_gather(json.dumps(report), deadline - time.monotonic())
        reports = [json.loads(text) for text in gathered]
        by_host = zip(Placement.in_stage(self._context).hosts, reports, strict=True)
        check_alike({host: each["software"] for host, each in by_host})
        return next(Rendezvous(**each["store"]) for each in reports if each["store"])

    def _all_gather(self, text: str, seconds: float) -> list[str]:
        """Exchange texts with all nodes, whose Python may hang: Spark itself waits for ever."""
        gathered: Future[list[str]] = Future()

        def gather() -> None:
            try:
                gathered.set_result(self._context.allGather(text))
            except Exception as error:
                gathered.set_exception(error)

        threading.Thread(target=gather, daemon=True).start()
        try:
            return gathered.result(max(seconds, 0.0))
        except FutureTimeout:
            raise StartTimeout("The other nodes did not come up within start_timeout.") from None

    def begin_last_barrier(self, then: Callable[[], object]) -> None:
        def wait() -> None:
            self._context.barrier()
            then()

        self._last_barrier = threading.Thread(target=wait, daemon=True)
        self._last_barrier.start()

    def await_last_barrier(self) -> None:
        """Wait until all nodes have come to the last barrier, if this one has."""
        if self._last_barrier:
            self._last_barrier.join()

    def write(self, rank: int, source: Source, data: bytes) -> None:
        if source == "stdout" or source == "stderr":
            self._log.write(rank, source, data)
        else:
            self.unsent_reports.add(Output(rank, source, data))


class ExecutorLog:
    """Writes complete lines to this process's stderr, which Spark stores with the executor's log.

    Cluster managers show it: ``yarn logs``, ``kubectl logs``, and the page of a standalone worker.
    """

    def __init__(self) -> None:
        self._begun: dict[tuple[int, Stream], bytes] = {}

    def write(self, rank: int, stream: Stream, data: bytes) -> None:
        """Write the lines that this completes, each with its rank."""
        *lines, rest = (self._begun.pop((rank, stream), b"") + data).split(b"\n")
        self._print(rank, lines)
        if rest:
            self._begun[rank, stream] = rest

    def close(self) -> None:
        """Write the lines that have not ended."""
        for (rank, _), rest in self._begun.items():
            self._print(rank, [rest])
        self._begun = {}

    def _print(self, rank: int, lines: list[bytes]) -> None:
        sys.stderr.buffer.write(b"".join(b"[%d] %s\n" % (rank, line) for line in lines))
        sys.stderr.flush()
