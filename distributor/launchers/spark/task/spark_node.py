"""A node inside a task of Spark: its place among the others, and what its ranks need."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from distributor._compat.pyspark import executor_of, sent_hadoop_configuration
from distributor.core.addresses import host_name, use_host_name
from distributor.core.gpus import missing_gpus
from distributor.core.resources import format_bytes, local_folder
from distributor.core.versions import check_interpreter, software
from distributor.errors import ExecutorNotReady
from distributor.launchers.spark.task.task_data import TaskSpec
from distributor.node import environment
from distributor.node.agent.network import routable_address, source_address
from distributor.node.agent.node_warnings import memory_warnings, node_warnings
from distributor.node.agent.worker_env import node_order, visible_devices
from distributor.node.cache import tree_size, with_default_cache
from distributor.node.environment import PreparedEnvironment
from distributor.node.node import Node, Provisions, zygote_spec
from distributor.node.process import zygote
from distributor.node.process.specs import NodeShare
from distributor.node.process.supervisor import Interpreter, is_supported
from distributor.node.worker.libraries import SPARK_FILES
from distributor.serialization.program import ContinuedCall, Module, Program, Script, in_file
from distributor.spark.shipped_files import (
    ProgramFile,
    made_once,
    spark_files_folder,
    unpack_modules,
)
from distributor.wire.messages import NodeWarning


def prepare_environment(spec: TaskSpec) -> AbstractContextManager[PreparedEnvironment]:
    """Make the interpreter ready with which this node's ranks run."""
    if spec.shipped.environment is None:
        return nullcontext(PreparedEnvironment(Interpreter.current(), software()))
    variables = with_default_cache({**os.environ, **spec.share.env}, spec.cache_dir)
    deadline = time.monotonic() + spec.share.settings.start_timeout
    spark_files = spark_files_folder()
    entries = [Path(entry).absolute() for entry in sys.path]
    beside = [str(entry) for entry in entries if entry.is_relative_to(spark_files)]
    shipped = spec.shipped.environment
    if isinstance(shipped, str):
        return environment.use_packed(spark_files / shipped, variables, deadline, beside)
    return environment.use_requirements(shipped, variables, deadline, beside)


def assigned_gpus(spec: TaskSpec, node_rank: int, context: Any) -> tuple[str, ...]:
    """Return the GPUs of this node's ranks, as entries for ``CUDA_VISIBLE_DEVICES``."""
    if not spec.use_gpu:
        return ()
    if spec.driver_gpus:
        first = node_rank * spec.share.ranks_per_node
        return spec.driver_gpus[first : first + spec.share.ranks_per_node]
    addresses = context.resources()["gpu"].addresses
    return visible_devices(addresses, os.environ.get("CUDA_VISIBLE_DEVICES"))


def program_file(program: Program | ProgramFile) -> BinaryIO:
    """Return a file with the program, and remove those of programs that no run needs any more."""
    if not isinstance(program, ProgramFile):
        return in_file(program_on_this_node(program))
    folder = spark_files_folder()
    for name in program.dropped:
        (folder / name).unlink(missing_ok=True)
    path = folder / program.name
    if program.further is None:
        return path.open("rb")
    return in_file(ContinuedCall(str(path), program.further))


def program_on_this_node(program: Program) -> Program:
    """Return the program with paths of this node; a script has the text that the driver read."""
    if isinstance(program, Module):
        return replace(program, folder="")
    if not isinstance(program, Script):
        return program
    try:
        if Path(program.path).read_bytes() == program.source:
            return program
    except OSError:
        pass  # not on this node: the nodes need not share the driver's disk
    digest = hashlib.sha256(program.source).hexdigest()[:12]
    source = program.source
    path = made_once(f"distributor-{digest}/{program.name}", lambda path: path.write_bytes(source))
    return replace(program, path=str(path))


MAX_SHOWN = 9
"""The largest number of files that ranks have left and that are named."""
_NOT_OF_RANKS = (".", "__", "distributor-", "stdout", "stderr", "tmp", "artifacts", "fetchFileTemp")


@dataclass(frozen=True)
class Placement:
    """Where the tasks of an attempt are.

    Parameters
    ----------
    executors : mapping of int to str
        The executor of each node, as its host, a colon, and its name there.
    node_rank : int
        Which node this one is.
    """

    executors: Mapping[int, str]
    node_rank: int

    @classmethod
    def in_stage(cls, context: Any) -> Placement:
        """Return the places of the tasks of a barrier stage, by Spark's context of one of them."""
        executors = [info.address for info in context.getTaskInfos()]
        order = node_order([host_of(executor) for executor in executors])
        return cls(
            {node: executors[task] for node, task in enumerate(order)},
            order.index(context.partitionId()),
        )

    @property
    def hosts(self) -> list[str]:
        return [host_of(executor) for executor in self.executors.values()]

    @property
    def host(self) -> str:
        return host_of(self.executors[self.node_rank])

    @property
    def tasks_of_executor(self) -> int:
        """How many of the tasks share this one's executor."""
        return list(self.executors.values()).count(self.executors[self.node_rank])


def host_of(executor: str) -> str:
    return executor.rpartition(":")[0]


def zygote_owner() -> int:
    """Return the process that zygotes of this executor end with.

    Spark ends its Python workers at any time, and their parent lives on.
    """
    return os.getppid()


def own_executor(driver: str) -> str:
    """Return the executor of this task of an ordinary job, as its host, a colon, and its name.

    Without a JVM that names them, the host is the address from which it reaches the driver.
    """
    owner = zygote_owner()
    host, name = executor_of(owner) or (source_address(driver), str(owner))
    return f"{host}:{name}"


def begin(spec: TaskSpec, placement: Placement) -> NodeShare:
    """Return the node's share, and have an executor's first zygote start.

    It imports torch while the nodes find each other.
    """
    use_host_name(placement.host)
    hadoop = sent_hadoop_configuration()
    share = replace(
        spec.share,
        node_rank=placement.node_rank,
        host=placement.host,
        executor=placement.executors[placement.node_rank],
        env={
            SPARK_FILES: str(spark_files_folder()),
            **({"HADOOP_CONF_DIR": hadoop} if hadoop else {}),
            **spec.share.env,
        },
    )
    if spec.shipped.environment is None and is_supported():
        wanted = zygote_spec(share, Interpreter.current(), zygote_owner())
        with contextlib.suppress(OSError):  # reported when the ranks are started
            if wanted:
                zygote.start_if_missing(wanted)
    return share


def check_node(spec: TaskSpec) -> None:
    """Check what the ranks need first."""
    if spec.shipped.environment is None:
        check_interpreter()
    wanted = spec.gpu_type if spec.use_gpu else None
    if wanted and (missing := missing_gpus(wanted, spec.share.ranks_per_node)):
        raise ExecutorNotReady(f"On {host_name()} {missing}.")


@contextlib.contextmanager
def provisions(
    spec: TaskSpec,
    node: Node,
    context: Any,
    placement: Placement,
    batches: Iterator[Any],
    replaced: str,
) -> Iterator[Provisions]:
    """Make ready what the node's ranks need.

    Parameters
    ----------
    spec : TaskSpec
        What the driver passed to the task.
    node : Node
        The node, whose share is completed.
    context : TaskContext
        Spark's context of the task.
    placement : Placement
        Where the tasks are.
    batches : iterator of RecordBatch
        The rows that Spark passes to the task.
    replaced : str
        What the user should know of a copy of this package that the task does not use.
    """
    node.share = replace(
        node.share,
        address=routable_address(placement.host, placement.hosts),
        gpus=assigned_gpus(spec, placement.node_rank, context),
        modules=unpack_modules(spec.shipped.modules) if spec.shipped.modules else "",
    )
    num_tasks = placement.tasks_of_executor
    about_memory: Iterable[NodeWarning] = ()
    if spec.check_memory:
        about_memory = memory_warnings(
            num_tasks * spec.share.ranks_per_node,
            num_tasks,
            warm=spec.share.settings.warm and is_supported(),
            is_warm=lambda: zygote.is_warm(zygote_owner()),
        )
    with (
        prepare_environment(spec) as prepared,
        _dataset_file(spec, batches) as data,
        program_file(spec.shipped.program) as program,
        _left_files_named(node),
    ):
        warnings = (*node_warnings(replaced), *about_memory)
        yield Provisions(prepared.interpreter, prepared.software, program, data, warnings)


def _dataset_file(
    spec: TaskSpec, batches: Iterator[Any]
) -> AbstractContextManager[BinaryIO | None]:
    """Write the rows into a file on one of Spark's local disks, for the node's ranks to map."""
    if spec.datasets:
        from distributor.data.chunk_file import write_chunks

        return write_chunks(batches, spec.datasets, spec.share.ranks_per_node, local_folder())
    for _ in batches:
        pass
    return nullcontext()


@contextlib.contextmanager
def _left_files_named(node: Node) -> Iterator[None]:
    """Name what the ranks beside rank 0 leave in the executor's folder, which ends with it."""
    if node.share.node_rank != 0 or executor_of(zygote_owner()) is None:
        yield  # with a local master, the folder is the driver's
        return
    before = _entries_here()
    yield
    with contextlib.suppress(OSError):  # the folder is gone already
        left = sorted(_entries_here() - before)[:MAX_SHOWN]
        shown = ", ".join(
            f"{name} ({format_bytes(tree_size(Path(name)) if is_dir else size)})"
            for name, is_dir, size, _ in left
        )
        if shown:
            text = (
                f"distributor: {shown} in {Path.cwd()} on {node.share.host} will be "
                "removed with this executor. Write to storage that outlives it, or return the "
                "value.\n"
            )
            node.write(0, "stderr", text.encode(errors="backslashreplace"))


def _entries_here() -> set[tuple[str, bool, int, int]]:
    """Return what is in this folder, its sizes and times, except for Spark's own."""
    found = set()
    for entry in os.scandir():
        if not entry.name.startswith(_NOT_OF_RANKS):
            with contextlib.suppress(OSError):  # it is gone
                status = entry.stat()
                found.add((entry.name, entry.is_dir(), status.st_size, status.st_mtime_ns))
    return found
