"""A task of Spark: a node of a run in a barrier stage, or of all attempts that it is assigned.

A task that has a link to the driver does not fail because of the user's program: Spark would kill
its Python worker, and the next run would import everything anew.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from distributor.core.addresses import host_name, joined, use_host_name
from distributor.core.processes import temporary_run_title
from distributor.core.text import printable
from distributor.core.threads import in_background
from distributor.core.versions import Software, check_alike
from distributor.errors import DistributorError, ExecutorNotReady, RunTimeout, StartTimeout
from distributor.launchers.spark.task.spark_node import (
    Placement,
    begin,
    check_node,
    host_of,
    own_executor,
    provisions,
    zygote_owner,
)
from distributor.launchers.spark.task.task_data import (
    MemberSpec,
    TaskSpec,
    UnsentReports,
    rows_of,
    save_large_values,
    save_refused_values,
    save_undelivered_values,
)
from distributor.node.agent.output import LogFiles
from distributor.node.node import Node, NodeStopped, RanksFailed, as_node_error
from distributor.serialization.outcome import Value
from distributor.wire.messages import (
    Assignment,
    AssignmentEnded,
    Dismissal,
    MemberUp,
    NodeWarning,
    Output,
    Rendezvous,
    Source,
    Stream,
)
from distributor.wire.node_link import NodeLink, NoLink
from distributor.wire.spark_error_payload import TaskFailed
from distributor.wire.tcp_link import TcpLink

if TYPE_CHECKING:
    import pyarrow as pa

MAX_NUMBERS = 2**31
"""Links have numbers below this one."""


def run(
    pickled_spec: bytes, batches: Iterator[Any], replaced: str = ""
) -> Iterator[pa.RecordBatch]:
    """Be a node of a run in a barrier stage, or hold a slot for the attempts of a run."""
    spec: TaskSpec | MemberSpec = pickle.loads(pickled_spec)
    try:
        if isinstance(spec, MemberSpec):
            _hold_slot(spec, batches, replaced)
        else:
            yield from _run_in_stage(spec, batches, replaced)
    except RanksFailed as error:
        raise TaskFailed.of(error.failures, spec.secret) from None
    except (StartTimeout, RunTimeout) as error:
        raise TaskFailed.timed_out(error, spec.secret) from None
    except Exception as error:
        # PySpark's worker dies if it cannot encode the text, and Spark never learns the cause.
        error.args = tuple(printable(a) if isinstance(a, str) else a for a in error.args)
        raise


def _run_in_stage(
    spec: TaskSpec, batches: Iterator[Any], replaced: str
) -> Iterator[pa.RecordBatch]:
    """Run one node; yield what did not reach the driver by the link as rows for Spark."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    with contextlib.closing(SparkDetour(spec, context)) as detour:
        try:
            values = _run_node(
                spec, context, Placement.in_stage(context), batches, replaced, detour
            )
        except NodeStopped:
            return
        detour.await_last_barrier()
    yield from rows_of(values)
    room, share = spec.max_spark_result_bytes - sum(value.size for value in values), spec.share
    yield from detour.unsent_reports.rows(room if share.keep_all else room // share.num_nodes)


def _run_node(
    spec: TaskSpec,
    context: Any,
    placement: Placement,
    batches: Iterator[Any],
    replaced: str,
    detour: SparkDetour | None = None,
) -> list[Value]:
    """Run one node; return the values that Spark has to carry."""
    share = begin(spec, placement)
    with (
        temporary_run_title(f"node {share.node_rank}", share.program_name, share.run_id),
        Node(share, detour) as node,
    ):
        node.open(_link(spec, node, is_required=detour is None))
        check_node(spec)
        prepared = provisions(spec, node, context, placement, batches, replaced)
        values, refused = node.run(prepared, zygote_owner())
        save_refused_values(values, refused, spec)
        save = save_undelivered_values if detour is None else save_large_values
        save(values, spec)
        return values


def _link(spec: TaskSpec, node: Node, *, is_required: bool) -> NodeLink:
    """Connect to the hub, if it can be reached."""
    callbacks = node.receive, node.lose_link, node.lose_driver
    try:
        return TcpLink(spec.hub, spec.secret, node.share.node_rank, *callbacks)
    except OSError as error:
        if is_required:
            raise
        print(f"distributor: no link to the driver at {spec.hub}: {error}", file=sys.stderr)
        return NoLink()


# Tasks of ordinary jobs


def _hold_slot(spec: MemberSpec, batches: Iterator[Any], replaced: str) -> None:
    """Hold a slot, and be a node of each attempt that the driver assigns to this task.

    The task does not fail if it loses its link: that would count for ``spark.task.maxFailures``.
    """
    from pyspark import TaskContext

    context: Any = TaskContext.get()
    number = context.taskAttemptId() % MAX_NUMBERS
    executor = own_executor(spec.hub[0])
    use_host_name(host_of(executor))
    received: queue.SimpleQueue[object] = queue.SimpleQueue()  # None once the link is lost

    def lose(reason: str = "") -> None:
        received.put(None)

    try:
        link = TcpLink(spec.hub, spec.secret, number, received.put, lose, lose)
    except OSError as error:
        raise ExecutorNotReady(
            f"The executor on {host_name()} cannot reach the driver at {joined(*spec.hub)} "
            f"({error}), to which the tasks of a run without a barrier stage connect: open "
            "this port to the executors, or set hub_address to an address that they reach."
        ) from error
    with contextlib.closing(link):
        link.send(MemberUp(spec.job, context.partitionId(), executor))
        for message in iter(received.get, None):
            if isinstance(message, Dismissal):
                break
            if isinstance(message, Assignment) and number in message.nodes:
                placement = Placement(message.executors, message.nodes[number])
                ending = _serve(message.spec, placement, context, batches, replaced)
                link.send(AssignmentEnded(message.serial, ending))
    for _ in batches:  # Spark keeps a Python worker only if it has read its input
        pass


def _serve(
    pickled_spec: bytes,
    placement: Placement,
    context: Any,
    batches: Iterator[Any],
    replaced: str,
) -> DistributorError | None:
    """Be a node of an attempt; return what ended it, unless the node has sent that."""
    spec: TaskSpec = pickle.loads(pickled_spec)
    try:
        _run_node(spec, context, placement, batches, replaced)
    except NodeStopped:
        pass
    except Exception as error:
        return as_node_error(error, placement.host)
    return None


# What Spark does for a node without a link

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

    def close(self) -> None:
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
        hosts = [host_of(info.address) for info in self._context.getTaskInfos()]
        by_host = zip(hosts, reports, strict=True)
        check_alike({host: each["software"] for host, each in by_host})
        return next(Rendezvous(**each["store"]) for each in reports if each["store"])

    def _all_gather(self, text: str, seconds: float) -> list[str]:
        """Exchange texts with all nodes, whose Python may hang: Spark itself waits for ever."""
        gathered = in_background(lambda: self._context.allGather(text), "all-gather")
        try:
            gathered_texts: list[str] = gathered.result(max(seconds, 0.0))
            return gathered_texts
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
