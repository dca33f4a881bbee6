"""One node of a run inside one Spark barrier task."""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from distributor.core.addresses import joined
from distributor.core.atomic_files import atomic_path, write_atomically
from distributor.core.gpus import missing_gpus
from distributor.core.host import host_name, use_host_name
from distributor.core.versions import check_interpreter, software
from distributor.errors import ExecutorNotReady, RunTimeout, StartTimeout
from distributor.node.agent.agent import Agent
from distributor.node.agent.memory import memory_warnings
from distributor.node.agent.network import listen_for_ranks, routable_address
from distributor.node.agent.node_spec import NodeSpec
from distributor.node.agent.node_warnings import node_warnings
from distributor.node.agent.worker_env import (
    common_environment,
    node_order,
    visible_devices,
)
from distributor.node.environment import resolve
from distributor.node.environment.build_once import with_default_cache
from distributor.node.environment.resolve import PreparedEnvironment
from distributor.node.process import zygote_client
from distributor.node.process.interpreter import Interpreter
from distributor.node.process.process_title import temporary_run_title
from distributor.node.process.supervisor_client import is_supported
from distributor.node.process.zygote_client import ZygoteSpec
from distributor.node.spark_task.channel import Channel, hosts_of, open_channel
from distributor.node.spark_task.task_spec import TaskSpec
from distributor.node.spark_task.value_fallback import keep_large, keep_refused
from distributor.serialization.outcome import Failure, Outcome, Value
from distributor.serialization.program import Module, Program, Script, in_file
from distributor.wire.messages import NodeWarning, Output, Rendezvous
from distributor.wire.spark_error_payload import TaskFailed

if TYPE_CHECKING:
    import pyarrow as pa

REACH_SECONDS = 10.0
ROWS = "rank int, part int, data binary"
"""The rows of a task: the values that did not reach the driver over the link, in parts."""
LATE = -1
"""The part of a row that has, pickled, what else did not."""


def run(
    pickled_spec: bytes, batches: Iterator[Any], replaced: str = ""
) -> Iterator[pa.RecordBatch]:
    """Be one node of the run: meet the others, run the ranks, hand over what they returned.

    Parameters
    ----------
    pickled_spec : bytes
        The `TaskSpec`.
    batches : iterator
        What Spark gives a task.
    replaced : str
        The copy of this package that is installed here and differs from the driver's, if any.

    Raises
    ------
    TaskFailed
        If a rank failed or a deadline passed: only a raise makes Spark stop the other tasks.
    """
    for _ in batches:  # they only number the tasks
        pass
    spec: TaskSpec = pickle.loads(pickled_spec)
    try:
        yield from _run_node(spec, replaced)
    except (StartTimeout, RunTimeout) as error:
        raise TaskFailed.timed_out(error, spec.secret) from None


def _run_node(spec: TaskSpec, replaced: str) -> Iterator[pa.RecordBatch]:
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    hosts = hosts_of(context)
    use_host_name(hosts[context.partitionId()])
    node_rank = node_order(hosts).index(context.partitionId())
    if spec.environment is None:
        check_interpreter()
    _check_gpus(spec)
    with (
        temporary_run_title(f"node {node_rank}", spec.program_name, spec.run_id),
        open_channel(spec, node_rank, hosts[context.partitionId()], context) as channel,
        _prepared(spec) as prepared,
    ):
        warnings = (*node_warnings(replaced), *_memory_warnings(spec, context))
        node, listener = _join(spec, node_rank, hosts, context, channel, prepared, warnings)
        outcomes = _run_ranks(spec, node, listener, channel, prepared.interpreter)
        delivered = channel.deliver(outcomes)
        values = [outcome for outcome in outcomes if isinstance(outcome, Value)]
        keep_refused(values, channel.refused, spec)
        left = [value for value in values if value.size and value.rank not in delivered]
        keep_large(left, spec)
        yield from _rows(left)
        yield from _late(channel.late)


def _memory_warnings(spec: TaskSpec, context: Any) -> Iterator[NodeWarning]:
    if not spec.check_memory:
        return iter(())
    executors = [info.address for info in context.getTaskInfos()]
    tasks = executors.count(executors[context.partitionId()])
    return memory_warnings(
        tasks * spec.ranks_per_node,
        tasks,
        warm=spec.warm and is_supported(),
        is_warm=lambda: zygote_client.is_warm(os.getppid()),
    )


def _prepared(spec: TaskSpec) -> AbstractContextManager[PreparedEnvironment]:
    """Make ready what this node's ranks run with."""
    if spec.environment is None:
        return nullcontext(PreparedEnvironment(Interpreter.current(), software()))
    variables = with_default_cache({**os.environ, **spec.env}, spec.cache_dir)
    deadline = time.monotonic() + spec.meet_timeout
    brought = _brought_by_spark()
    entries = [Path(entry).absolute() for entry in sys.path]
    beside = [str(entry) for entry in entries if entry.is_relative_to(brought)]
    if isinstance(spec.environment, str):
        folder = brought / spec.environment
        return resolve.use_packed(folder, variables, deadline, beside)
    return resolve.use_requirements(spec.environment, variables, deadline, beside)


def _brought_by_spark() -> Path:
    """Give the folder of Spark's files, which Spark names from its working folder."""
    from pyspark import SparkFiles

    return Path(SparkFiles.getRootDirectory()).absolute()


def _join(
    spec: TaskSpec,
    node_rank: int,
    hosts: list[str],
    context: Any,
    channel: Channel,
    prepared: PreparedEnvironment,
    warnings: tuple[NodeWarning, ...],
) -> tuple[NodeSpec, socket.socket | None]:
    """Agree with the other nodes on where rank 0's store listens."""
    host = hosts[context.partitionId()]
    address = routable_address(host, hosts)
    listener = listen_for_ranks(address, spec.rank_ports) if node_rank == 0 else None
    mine = Rendezvous(address, listener.getsockname()[1]) if listener else None
    meeting = channel.meet(mine, prepared.software, warnings)
    if node_rank != 0:
        _check_way(meeting)
    node = NodeSpec(
        run_id=spec.run_id,
        attempt=spec.attempt,
        host=host,
        address=address,
        node_rank=node_rank,
        num_nodes=len(hosts),
        ranks_per_node=spec.ranks_per_node,
        master_addr=meeting.host,
        master_port=meeting.port,
        gpus=_gpus(spec, node_rank, context),
        env={**prepared.interpreter.variables, **spec.env},
        modules=_modules(spec.modules) if spec.modules else "",
        program_name=spec.program_name,
    )
    return node, listener


def _modules(archive: str) -> str:
    """Unpack the user's modules, once on this node."""
    from pyspark import SparkFiles

    folder = _brought_by_spark() / archive.removesuffix(".zip")
    if not folder.exists():
        with atomic_path(folder) as partial:  # other tasks of this node may be doing the same
            shutil.unpack_archive(SparkFiles.get(archive), partial, "zip")
    return str(folder)


def _check_way(store: Rendezvous) -> None:
    """Find out now, in seconds, what torch would wait half an hour for."""
    try:
        socket.create_connection((store.host, store.port), REACH_SECONDS).close()
    except OSError as error:
        if isinstance(error, ConnectionRefusedError):
            # Rank 0 may have ended already: its own node then tells why, which ends this task.
            time.sleep(REACH_SECONDS)
        raise ExecutorNotReady(
            f"The executor on {host_name()} cannot reach rank 0's at "
            f"{joined(store.host, store.port)} ({error}). Ranks talk to each other over TCP: open "
            "the way between the hosts of the executors, in both directions. rank_ports bounds the "
            "port of rank 0's store, and the hosts' net.ipv4.ip_local_port_range those of gloo and "
            "NCCL."
        ) from error


def _check_gpus(spec: TaskSpec) -> None:
    if (
        spec.use_gpu
        and spec.gpu_type
        and (lack := missing_gpus(spec.gpu_type, spec.ranks_per_node))
    ):
        raise ExecutorNotReady(f"On {host_name()} {lack}.")


def _gpus(spec: TaskSpec, node_rank: int, context: Any) -> tuple[str, ...]:
    if not spec.use_gpu:
        return ()
    if spec.driver_gpus:
        first = node_rank * spec.ranks_per_node
        return spec.driver_gpus[first : first + spec.ranks_per_node]
    addresses = context.resources()["gpu"].addresses
    return visible_devices(addresses, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _run_ranks(
    spec: TaskSpec,
    node: NodeSpec,
    listener: socket.socket | None,
    channel: Channel,
    interpreter: Interpreter,
) -> list[Outcome]:
    deadline = time.monotonic() + spec.meet_timeout
    with (
        _program_file(spec.program) as program,
        zygote_client.open_spawner(
            _zygote_spec(spec, interpreter), deadline, interpreter
        ) as spawner,
    ):
        agent = Agent(
            node,
            program,
            channel,
            spawner,
            listener=listener,
            keep_all=spec.keep_all,
            patience=channel.patience,
            on_started=channel.started,
            on_failure=channel.failed,
            on_stacks=channel.stacks,
            on_done=channel.done,
            on_subscribed=channel.subscribed,
            on_sigterm=channel.sigterm_received,
        )
        with agent:
            channel.attach(agent)
            slack = channel.deadline_slack
            timeout = math.inf if spec.timeout is None else spec.timeout
            outcomes = agent.run(deadline + slack, timeout + slack)
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    if failures or channel.stopped:
        channel.await_verdict(failures)
        raise TaskFailed.of(failures, spec.secret)
    return outcomes


def _zygote_spec(spec: TaskSpec, interpreter: Interpreter) -> ZygoteSpec | None:
    if not spec.warm:
        return None
    env = {**interpreter.variables, **spec.env}
    return ZygoteSpec(
        owner=os.getppid(),  # Spark ends its workers as it likes; their parent lives on
        environment=common_environment(spec.ranks_per_node, env, os.environ),
        preload=spec.preload,
        interpreter=interpreter,
    )


def _program_file(program: Program | str) -> BinaryIO:
    from pyspark import SparkFiles

    if isinstance(program, str):
        return Path(SparkFiles.get(program)).open("rb")
    return in_file(_placed(program))


def _placed(program: Program) -> Program:
    """See to it that a script lies on this node: the driver's text, whatever was here before."""
    if isinstance(program, Module):
        return replace(program, folder="")
    if not isinstance(program, Script):
        return program
    try:
        if Path(program.path).read_bytes() == program.source:
            return program
    except OSError:
        pass  # not here: the nodes need not share the driver's disk
    return replace(program, path=str(_written(program)))


def _written(script: Script) -> Path:
    from pyspark import SparkFiles

    digest = hashlib.sha256(script.source).hexdigest()[:12]
    path = Path(SparkFiles.getRootDirectory(), f"distributor-{digest}", script.name)
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, script.source)
    return path


def _rows(values: list[Value]) -> Iterator[pa.RecordBatch]:
    for value in values:
        for part, data in enumerate(value.parts()):
            yield _row(value.rank, part, data)


def _late(messages: list[Output]) -> Iterator[pa.RecordBatch]:
    if messages:
        yield _row(messages[0].rank, LATE, pickle.dumps(messages))


def _row(rank: int, part: int, data: bytes) -> pa.RecordBatch:
    import pyarrow as pa

    schema = pa.schema([("rank", pa.int32()), ("part", pa.int32()), ("data", pa.binary())])
    columns: list[list[Any]] = [[rank], [part], [data]]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
