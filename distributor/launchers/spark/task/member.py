"""A task of a gang: it holds a slot for a run, and is a node of the run's attempts."""

from __future__ import annotations

import pickle
import queue
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distributor.core.addresses import host_name, joined, use_host_name
from distributor.core.text import printable
from distributor.errors import DistributorError, ExecutorNotReady
from distributor.launchers.spark.task.spark_node import (
    Placement,
    begin,
    own_executor,
    provisions,
    zygote_owner,
)
from distributor.launchers.spark.task.task_spec import TaskSpec
from distributor.launchers.spark.task.value_fallback import (
    save_refused_values,
    save_undelivered_values,
)
from distributor.link.tcp_link import TcpLink
from distributor.node.lifecycle import NodeEvent
from distributor.node.node import Node, NodeStopped, run_node
from distributor.node.process.process_title import temporary_run_title
from distributor.serialization.outcome import Value
from distributor.wire.messages import Assignment, AssignmentEnded, Dismissal, MemberUp

if TYPE_CHECKING:
    import pyarrow as pa

MAX_NUMBERS = 2**31
"""Links have numbers below this one."""


@dataclass(frozen=True)
class MemberSpec:
    """What the driver passes to every task of a gang, pickled with the task.

    Parameters
    ----------
    hub : tuple of str and int
        The address and port of the driver's hub for the gang.
    secret : bytes
        With which the tasks and that hub authenticate each other.
    job : int
        Which of the gang's jobs this is.
    """

    hub: tuple[str, int]
    secret: bytes = field(repr=False)
    job: int


def run(pickled: bytes, batches: Iterator[Any], replaced: str = "") -> Iterator[pa.RecordBatch]:
    """Hold a slot, and be a node of each attempt that the driver assigns to this task.

    A failure of the ranks is not one of this task, which Spark would run again. Nor does the task
    fail if it loses its link: that would count for ``spark.task.maxFailures``.
    """
    from pyspark import TaskContext

    spec: MemberSpec = pickle.loads(pickled)
    context = TaskContext.get()
    with _Assignments(spec, context) as assignments:
        for assignment in assignments:
            error = _serve(assignment, assignments.number, context, batches, replaced)
            assignments.report(AssignmentEnded(assignment.serial, error))
    for _ in batches:  # Spark keeps a Python worker only if it has read its input
        pass
    yield from ()


class _Assignments:
    """The link to the driver: iterates over assignments until it is lost, or a dismissal comes."""

    def __init__(self, spec: MemberSpec, context: Any) -> None:
        self.number = context.taskAttemptId() % MAX_NUMBERS
        self._hub = spec.hub
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
) -> Exception | None:
    """Be a node of an attempt; return what ended it, if that is an error of the node's own."""
    placement = Placement(assignment.executors, assignment.places[number])
    try:
        _run_node(pickle.loads(assignment.spec), context, placement, batches, replaced)
    except NodeStopped:
        return None
    except DistributorError as error:
        return error
    except Exception as error:
        text = printable(f"{type(error).__name__}: {error}")
        return DistributorError(f"The node on {placement.host} failed: {text}")
    return None


def _run_node(
    spec: TaskSpec, context: Any, placement: Placement, batches: Iterator[Any], replaced: str
) -> None:
    share = begin(spec, placement)
    with (
        temporary_run_title(f"node {share.node_rank}", share.program_name, share.run_id),
        Node(share) as node,
    ):
        callbacks = node.receive, node.lose_link, node.lose_driver
        node.open(TcpLink(spec.hub, spec.secret, share.node_rank, *callbacks))
        prepared = provisions(spec, node, context, placement, batches, replaced)
        outcomes = run_node(node, prepared, zygote_owner())
        values = [outcome for outcome in outcomes if isinstance(outcome, Value)]
        try:
            if node.lifecycle.fire(NodeEvent.RANKS_ENDED):
                _deliver(spec, node, values)
                node.lifecycle.fire(NodeEvent.VALUES_DELIVERED)
        finally:
            for value in values:
                value.file.close()


def _deliver(spec: TaskSpec, node: Node, values: list[Value]) -> None:
    delivery = node.link.deliver(values)
    save_refused_values(values, delivery.refused, spec)
    save_undelivered_values(
        [value for value in values if value.size and value.rank not in delivery.received], spec
    )
