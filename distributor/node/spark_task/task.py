"""One node of a run inside one Spark barrier task."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import socket
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

from distributor._compat.pyspark import sent_hadoop_configuration
from distributor.core.addresses import use_host_name
from distributor.core.text import printable
from distributor.core.versions import check_interpreter
from distributor.errors import RunTimeout, StartTimeout
from distributor.node.agent.agent import Agent
from distributor.node.agent.network import listen_for_ranks, routable_address
from distributor.node.agent.node_spec import NodeSpec
from distributor.node.agent.node_warnings import node_warnings
from distributor.node.agent.worker_env import common_environment, node_order
from distributor.node.environment.resolve import PreparedEnvironment
from distributor.node.process import zygote
from distributor.node.process.process_title import temporary_run_title
from distributor.node.process.spawner import Interpreter, StartLimit
from distributor.node.process.supervisor import is_supported
from distributor.node.process.zygote import ZygoteSpec
from distributor.node.spark_task.channel import Channel
from distributor.node.spark_task.dataset_file import dataset_file
from distributor.node.spark_task.hub_channel import HubChannel
from distributor.node.spark_task.node_resources import (
    assigned_gpus,
    check_gpu_type,
    prepare_environment,
    warnings_about_memory,
)
from distributor.node.spark_task.node_state import NodeEvent, NodeLifecycle
from distributor.node.spark_task.program_file import program_file
from distributor.node.spark_task.rendezvous import check_reachable, hosts_of
from distributor.node.spark_task.result_rows import rows_of
from distributor.node.spark_task.shipped_files import unpack_modules
from distributor.node.spark_task.spark_channel import SparkChannel
from distributor.node.spark_task.task_spec import TaskSpec
from distributor.node.spark_task.value_fallback import save_large_values, save_refused_values
from distributor.node.worker.libraries import SPARK_FILES
from distributor.serialization.outcome import Failure, Value
from distributor.wire.messages import NodeWarning, Rendezvous
from distributor.wire.sealing import rank_secret
from distributor.wire.spark_error_payload import TaskFailed

if TYPE_CHECKING:
    import pyarrow as pa


def run(
    pickled_spec: bytes, batches: Iterator[Any], replaced: str = ""
) -> Iterator[pa.RecordBatch]:
    """Run one node of a run: find the other nodes, run the ranks, and deliver their values.

    Parameters
    ----------
    pickled_spec : bytes
        The `TaskSpec`.
    batches : iterator
        The rows that Spark passes to the task.
    replaced : str
        The copy of this package that is installed here and differs from the driver's, if any.

    Yields
    ------
    RecordBatch
        What did not reach the driver over the link; see `result_rows`.

    Raises
    ------
    TaskFailed
        If a rank failed, a deadline passed, or the driver has ended the run. Spark stops the other
        tasks only if this one raises.
    ExecutorNotReady
        If this node lacks something that its ranks need.
    ValueTooLarge
        If a value cannot reach the driver.
    """
    spec: TaskSpec = pickle.loads(pickled_spec)
    try:
        yield from _run_node(spec, batches, replaced)
    except (StartTimeout, RunTimeout) as error:
        raise TaskFailed.timed_out(error, spec.secret) from None
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
    node_rank = node_order(hosts).index(context.partitionId())
    if spec.environment is None:
        check_interpreter()
    check_gpu_type(spec)
    _start_zygote(spec)
    with (
        NodeLifecycle() as lifecycle,
        temporary_run_title(f"node {node_rank}", spec.program_name, spec.run_id),
        _open_channel(spec, node_rank, host, context, lifecycle) as channel,
    ):
        lifecycle.fire(NodeEvent.CHANNEL_OPENED)
        address = routable_address(host, hosts)
        with (
            prepare_environment(spec) as prepared,
            dataset_file(spec, batches) as data,
            program_file(spec, channel, node_rank, address) as program,
        ):
            lifecycle.fire(NodeEvent.ENVIRONMENT_READY)
            warnings = (*node_warnings(replaced), *warnings_about_memory(spec, context))
            node, store_socket = _join(
                spec, node_rank, address, context, channel, prepared, warnings
            )
            lifecycle.fire(NodeEvent.RENDEZVOUS_KNOWN)
            if node_rank != 0:
                check_reachable(Rendezvous(node.master_addr, node.master_port))
            values = _run_ranks(
                spec, node, store_socket, program, data, channel, prepared.interpreter, lifecycle
            )
            yield from _deliver(spec, channel, values, node.num_nodes)
            lifecycle.fire(NodeEvent.VALUES_DELIVERED)


def _open_channel(
    spec: TaskSpec, node_rank: int, host: str, context: Any, lifecycle: NodeLifecycle
) -> Channel:
    """Connect to the hub; if it cannot be reached, return a channel through Spark alone."""
    spark_channel = SparkChannel(spec, context, lifecycle)
    channel = HubChannel(spec, spark_channel, lifecycle)
    try:
        channel.connect(node_rank, host)
    except OSError as error:
        print(f"distributor: no link to the driver at {spec.hub}: {error}", file=sys.stderr)
        return spark_channel
    return channel


def _join(
    spec: TaskSpec,
    node_rank: int,
    address: str,
    context: Any,
    channel: Channel,
    prepared: PreparedEnvironment,
    warnings: tuple[NodeWarning, ...],
) -> tuple[NodeSpec, socket.socket | None]:
    """Agree with the other nodes on where rank 0's store listens."""
    from pyspark import SparkFiles

    hosts, files = hosts_of(context), os.path.abspath(SparkFiles.getRootDirectory())
    store_socket = listen_for_ranks(address, spec.rank_ports) if node_rank == 0 else None
    own = Rendezvous(address, store_socket.getsockname()[1]) if store_socket else None
    store = channel.exchange_rendezvous(own, prepared.software, warnings)
    node = NodeSpec(
        run_id=spec.run_id,
        attempt=spec.attempt,
        host=hosts[context.partitionId()],
        address=address,
        node_rank=node_rank,
        num_nodes=len(hosts),
        ranks_per_node=spec.ranks_per_node,
        master_addr=store.host,
        master_port=store.port,
        gpus=assigned_gpus(spec, node_rank, context),
        env={
            SPARK_FILES: files,
            **_hadoop_variables(),
            **prepared.interpreter.variables,
            **spec.env,
        },
        modules=unpack_modules(spec.modules) if spec.modules else "",
        program_name=spec.program_name,
        secret=rank_secret(spec.secret),
    )
    return node, store_socket


def _hadoop_variables() -> dict[str, str]:
    """Return the variable that names the configuration of Hadoop, if Spark has sent it."""
    folder = sent_hadoop_configuration()
    return {"HADOOP_CONF_DIR": folder} if folder else {}


def _run_ranks(
    spec: TaskSpec,
    node: NodeSpec,
    store_socket: socket.socket | None,
    program: BinaryIO,
    data: BinaryIO | None,
    channel: Channel,
    interpreter: Interpreter,
    lifecycle: NodeLifecycle,
) -> list[Value]:
    """Run the node's ranks until they end, and return the values of a run that succeeds."""

    def check() -> None:
        if lifecycle.is_ended_by_driver:
            raise TaskFailed.of([], spec.secret)

    limit = StartLimit(time.monotonic() + spec.rendezvous_timeout, check)
    with zygote.open_spawner(_zygote_spec(spec, interpreter), limit, interpreter) as spawner:
        agent = Agent(
            node,
            program,
            spawner,
            channel,
            store_socket=store_socket,
            data=data,
            keep_all=spec.keep_all,
            head_start=channel.head_start,
            activity_interval=spec.activity_interval,
        )
        with agent:
            channel.attach(agent)
            slack = channel.deadline_slack
            timeout = math.inf if spec.timeout is None else spec.timeout
            outcomes = agent.run(limit.deadline + slack, timeout + slack)
    if not lifecycle.fire(NodeEvent.RANKS_ENDED):  # a rank failed, or the run has ended elsewhere
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        if channel.await_verdict(failures):
            raise TaskFailed.of(failures, spec.secret)
    return [outcome for outcome in outcomes if isinstance(outcome, Value)]


def _start_zygote(spec: TaskSpec) -> None:
    """Have an executor's first zygote import torch while the nodes find each other."""
    zygote_spec = _zygote_spec(spec, Interpreter.current())
    if zygote_spec and spec.environment is None and is_supported():
        with contextlib.suppress(OSError):  # reported when the ranks are started
            zygote.start_if_missing(zygote_spec)


def _zygote_spec(spec: TaskSpec, interpreter: Interpreter) -> ZygoteSpec | None:
    if not spec.warm:
        return None
    env = {**interpreter.variables, **spec.env}
    return ZygoteSpec(
        owner=os.getppid(),  # Spark ends its Python workers at any time; their parent lives on
        environment=common_environment(spec.ranks_per_node, env, os.environ),
        preload=spec.preload,
        interpreter=interpreter,
    )


def _deliver(
    spec: TaskSpec, channel: Channel, values: list[Value], num_nodes: int
) -> Iterator[pa.RecordBatch]:
    """Send values over the link; yield the rest as rows for Spark."""
    delivery = channel.deliver(values)
    save_refused_values(values, delivery.refused, spec)
    rest = [value for value in values if value.size and value.rank not in delivery.received]
    save_large_values(rest, spec)
    yield from rows_of(rest)
    room = spec.max_spark_result_bytes - sum(value.size for value in rest)
    yield from channel.unsent_reports.rows(room if spec.keep_all else room // num_nodes)
