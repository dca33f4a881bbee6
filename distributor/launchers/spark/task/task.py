"""A task of Spark: a node of a run in a barrier stage, or of all attempts that it is assigned.

A task that has a link to the driver does not fail because of the user's program: Spark would kill
its Python worker, and the next run would import everything anew.
"""

from __future__ import annotations

import pickle
import queue
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from distributor.core.addresses import host_name, joined, use_host_name
from distributor.core.text import printable
from distributor.errors import DistributorError, ExecutorNotReady, RunTimeout, StartTimeout
from distributor.launchers.spark.task.detour import SparkDetour
from distributor.launchers.spark.task.result_rows import (
    rows_of,
    save_large_values,
    save_refused_values,
    save_undelivered_values,
)
from distributor.launchers.spark.task.spark_node import (
    Placement,
    begin,
    check_node,
    own_executor,
    provisions,
    zygote_owner,
)
from distributor.launchers.spark.task.task_spec import MemberSpec, TaskSpec
from distributor.node.node import Node, NodeStopped, RanksFailed, as_node_error
from distributor.node.process.process_title import temporary_run_title
from distributor.serialization.outcome import Value
from distributor.wire.messages import Assignment, AssignmentEnded, Dismissal, MemberUp
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
    with SparkDetour(spec, context) as detour:
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

    context = TaskContext.get()
    with _Assignments(spec, context) as assignments:
        for assignment in assignments:
            error = _serve(assignment, assignments.number, context, batches, replaced)
            assignments.report(AssignmentEnded(assignment.serial, error))
    for _ in batches:  # Spark keeps a Python worker only if it has read its input
        pass


class _Assignments:
    """The link to the driver: iterates over assignments until it is lost, or a dismissal comes."""

    def __init__(self, spec: MemberSpec, context: Any) -> None:
        self.number = context.taskAttemptId() % MAX_NUMBERS
        self._received: queue.SimpleQueue[Assignment | Dismissal | None] = queue.SimpleQueue()
        executor = own_executor(spec.hub[0])
        use_host_name(executor.rpartition(":")[0])
        try:
            self._link = TcpLink(
                spec.hub,
                spec.secret,
                self.number,
                self._receive,
                lambda: self._received.put(None),
                lambda reason: self._received.put(None),
            )
        except OSError as error:
            raise ExecutorNotReady(
                f"The executor on {host_name()} cannot reach the driver at {joined(*spec.hub)} "
                f"({error}), to which the tasks of a run without a barrier stage connect: open "
                "this port to the executors, or set hub_address to an address that they reach."
            ) from error
        self._link.send(MemberUp(spec.job, context.partitionId(), executor))

    def __enter__(self) -> _Assignments:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._link.close()

    def __iter__(self) -> Iterator[Assignment]:
        while isinstance(message := self._received.get(), Assignment):
            if self.number in message.places:
                yield message

    def report(self, ended: AssignmentEnded) -> None:
        self._link.send(ended)

    def _receive(self, message: object) -> None:
        if isinstance(message, Assignment | Dismissal):
            self._received.put(message)


def _serve(
    assignment: Assignment, number: int, context: Any, batches: Iterator[Any], replaced: str
) -> DistributorError | None:
    """Be a node of an attempt; return what ended it, unless the node has sent that."""
    placement = Placement(assignment.executors, assignment.places[number])
    spec: TaskSpec = pickle.loads(assignment.spec)
    try:
        _run_node(spec, context, placement, batches, replaced)
    except NodeStopped:
        pass
    except Exception as error:
        return as_node_error(error, placement.host)
    return None
