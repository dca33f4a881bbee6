"""One node of a run inside one Spark barrier task."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distributor._compat.pyspark import sent_hadoop_configuration
from distributor.core.addresses import use_host_name
from distributor.core.text import printable
from distributor.core.versions import check_interpreter
from distributor.errors import RunTimeout, StartTimeout
from distributor.launchers.spark.task.dataset_file import dataset_file
from distributor.launchers.spark.task.detour import SparkDetour, hosts_of
from distributor.launchers.spark.task.node_resources import (
    assigned_gpus,
    check_gpu_type,
    prepare_environment,
    warnings_about_memory,
)
from distributor.launchers.spark.task.program_file import program_file
from distributor.launchers.spark.task.result_rows import rows_of
from distributor.launchers.spark.task.shipped_files import unpack_modules
from distributor.launchers.spark.task.task_spec import TaskSpec
from distributor.launchers.spark.task.value_fallback import save_large_values, save_refused_values
from distributor.link.node_link import NodeLink, NoLink
from distributor.link.tcp_link import TcpLink
from distributor.node.agent.network import routable_address
from distributor.node.agent.node_warnings import node_warnings
from distributor.node.agent.share import NodeShare
from distributor.node.agent.worker_env import node_order
from distributor.node.lifecycle import NodeEvent, NodeState
from distributor.node.node import Node, NodeStopped, Provisions, run_node, zygote_spec
from distributor.node.process import zygote
from distributor.node.process.process_title import temporary_run_title
from distributor.node.process.spawner import Interpreter
from distributor.node.process.supervisor import is_supported
from distributor.node.worker.libraries import SPARK_FILES
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
    hosts = hosts_of(context)
    host = hosts[context.partitionId()]
    use_host_name(host)
    if spec.environment is None:
        check_interpreter()
    check_gpu_type(spec)
    share = _share(spec, context, hosts)
    owner = os.getppid()  # Spark ends its Python workers at any time; their parent lives on
    if spec.environment is None:
        _start_zygote(share, owner)
    with (
        temporary_run_title(f"node {share.node_rank}", share.program_name, share.run_id),
        SparkDetour(spec, context) as detour,
        Node(share, detour) as node,
    ):
        node.open(_link(spec, node))
        outcomes = run_node(node, _provisions(spec, node, context, batches, replaced), owner)
        if not node.lifecycle.fire(NodeEvent.RANKS_ENDED):  # a rank failed, or the run ended
            failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
            if _await_verdict(node, failures):
                raise TaskFailed.of(failures, spec.secret)
        yield from _deliver(spec, node, detour, outcomes)
        node.lifecycle.fire(NodeEvent.VALUES_DELIVERED)


def _share(spec: TaskSpec, context: Any, hosts: Sequence[str]) -> NodeShare:
    from pyspark import SparkFiles

    host = hosts[context.partitionId()]
    node_rank = node_order(hosts).index(context.partitionId())
    files = os.path.abspath(SparkFiles.getRootDirectory())
    hadoop = sent_hadoop_configuration()
    return replace(
        spec.share,
        node_rank=node_rank,
        host=host,
        env={
            SPARK_FILES: files,
            **({"HADOOP_CONF_DIR": hadoop} if hadoop else {}),
            **spec.share.env,
        },
    )


def _start_zygote(share: NodeShare, owner: int) -> None:
    """Have an executor's first zygote import torch while the nodes find each other."""
    wanted = zygote_spec(share, Interpreter.current(), owner)
    if wanted and is_supported():
        with contextlib.suppress(OSError):  # reported when the ranks are started
            zygote.start_if_missing(wanted)


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


@contextlib.contextmanager
def _provisions(
    spec: TaskSpec, node: Node, context: Any, batches: Iterator[Any], replaced: str
) -> Iterator[Provisions]:
    node.share = replace(
        node.share,
        address=routable_address(node.share.host, hosts_of(context)),
        gpus=assigned_gpus(spec, node.share.node_rank, context),
        modules=unpack_modules(spec.modules) if spec.modules else "",
    )
    with (
        prepare_environment(spec) as prepared,
        dataset_file(spec, batches) as data,
        program_file(spec, node) as program,
    ):
        warnings = (*node_warnings(replaced), *warnings_about_memory(spec, context))
        yield Provisions(prepared.interpreter, prepared.software, program, data, warnings)


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
