"""One node of a run inside one Spark barrier task."""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from distributor.core.text import printable
from distributor.errors import RunTimeout, StartTimeout
from distributor.launchers.spark.task.detour import SparkDetour
from distributor.launchers.spark.task.result_rows import rows_of
from distributor.launchers.spark.task.spark_node import Placement, begin, provisions, zygote_owner
from distributor.launchers.spark.task.task_spec import TaskSpec
from distributor.launchers.spark.task.value_fallback import save_large_values, save_refused_values
from distributor.link.node_link import NodeLink, NoLink
from distributor.link.tcp_link import TcpLink
from distributor.node.lifecycle import NodeEvent, NodeState
from distributor.node.node import Node, NodeStopped, run_node
from distributor.node.process.process_title import temporary_run_title
from distributor.policies.failure_grace import AFTER_COLLATERAL_SECONDS
from distributor.serialization.outcome import Failure, Outcome, Value
from distributor.wire.spark_error_payload import TaskFailed

if TYPE_CHECKING:
    import pyarrow as pa


def run(
    pickled_spec: bytes, batches: Iterator[Any], replaced: str = ""
) -> Iterator[pa.RecordBatch]:
    """Run one node of a run: find the other nodes, run the ranks, and deliver their values."""
    spec: TaskSpec = pickle.loads(pickled_spec)
    try:
        yield from _run_node(spec, batches, replaced)
    except (StartTimeout, RunTimeout) as error:
        raise TaskFailed.timed_out(error, spec.secret) from None
    except NodeStopped:
        raise TaskFailed.of([], spec.secret) from None
    except Exception as error:
        # PySpark's worker dies if it cannot encode the text, and Spark never learns the cause.
        error.args = tuple(printable(a) if isinstance(a, str) else a for a in error.args)
        raise


def _run_node(spec: TaskSpec, batches: Iterator[Any], replaced: str) -> Iterator[pa.RecordBatch]:
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    placement = Placement.in_stage(context)
    share = begin(spec, placement)
    with (
        temporary_run_title(f"node {share.node_rank}", share.program_name, share.run_id),
        SparkDetour(spec, context) as detour,
        Node(share, detour) as node,
    ):
        node.open(_link(spec, node))
        prepared = provisions(spec, node, context, placement, batches, replaced)
        outcomes = run_node(node, prepared, zygote_owner())
        if not node.lifecycle.fire(NodeEvent.RANKS_ENDED):  # a rank failed, or the run ended
            failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
            if _await_verdict(node, failures):
                raise TaskFailed.of(failures, spec.secret)
        yield from _deliver(spec, node, detour, outcomes)
        node.lifecycle.fire(NodeEvent.VALUES_DELIVERED)


def _link(spec: TaskSpec, node: Node) -> NodeLink:
    """Connect to the hub, if it can be reached."""
    try:
        return TcpLink(
            spec.hub,
            spec.secret,
            node.share.node_rank,
            node.receive,
            node.lose_link,
            node.lose_driver,
        )
    except OSError as error:
        print(f"distributor: no link to the driver at {spec.hub}: {error}", file=sys.stderr)
        return NoLink()


def _await_verdict(node: Node, failures: Sequence[Failure]) -> bool:
    """Wait before failures end this task; return whether it fails, which ends all others."""
    if node.lifecycle.state is NodeState.STOPPED:
        return node.fails_if_stopped
    if node.link.lost:
        if failures and all(failure.collateral for failure in failures):
            time.sleep(AFTER_COLLATERAL_SECONDS)  # the task that has the cause may end this one
        return True
    lifecycle = node.lifecycle
    lifecycle.wait_for(lambda: lifecycle.is_ended_by_driver or node.link.lost, node.head_start)
    return node.fails_if_stopped


def _deliver(
    spec: TaskSpec, node: Node, detour: SparkDetour, outcomes: Sequence[Outcome]
) -> Iterator[pa.RecordBatch]:
    """Send values over the link; yield the rest as rows for Spark."""
    values = [outcome for outcome in outcomes if isinstance(outcome, Value)]
    if node.took_detour:
        detour.await_last_barrier()
    delivery = node.link.deliver(values)
    save_refused_values(values, delivery.refused, spec)
    rest = [value for value in values if value.size and value.rank not in delivery.received]
    save_large_values(rest, spec)
    yield from rows_of(rest)
    room = spec.max_spark_result_bytes - sum(value.size for value in rest)
    share = node.share
    yield from detour.unsent_reports.rows(room if share.keep_all else room // share.num_nodes)
