"""A node inside a task of Spark: its place among the others, and what its ranks need."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from distributor._compat.pyspark import sent_hadoop_configuration
from distributor._compat.spark_executor import executor_of
from distributor.core.addresses import use_host_name
from distributor.core.resources import format_bytes, local_folder
from distributor.core.versions import check_interpreter
from distributor.launchers.spark.task.node_resources import (
    assigned_gpus,
    check_gpu_type,
    prepare_environment,
    warnings_about_memory,
)
from distributor.launchers.spark.task.shipped_files import program_file
from distributor.launchers.spark.task.task_spec import TaskSpec
from distributor.node.agent.network import routable_address, source_address
from distributor.node.agent.node_warnings import node_warnings
from distributor.node.agent.share import NodeShare
from distributor.node.agent.worker_env import node_order
from distributor.node.environment.cache import tree_size
from distributor.node.node import Node, Provisions, zygote_spec
from distributor.node.process import zygote
from distributor.node.process.spawner import Interpreter
from distributor.node.process.supervisor import is_supported
from distributor.node.worker.libraries import SPARK_FILES
from distributor.spark.executor_modules import unpack_modules

MAX_SHOWN = 9
"""The largest number of files that ranks have left and that are named."""
_NOT_OF_RANKS = (".", "__", "distributor-", "stdout", "stderr", "tmp", "artifacts", "fetchFileTemp")


@dataclass(frozen=True)
class Placement:
    """Where the tasks of an attempt are.

    Parameters
    ----------
    executors : sequence of str
        The executor of each task, as its host, a colon, and its name there.
    own : int
        Which of them is this one.
    """

    executors: Sequence[str]
    own: int

    @classmethod
    def in_stage(cls, context: Any) -> Placement:
        """Return the places of the tasks of a barrier stage, by Spark's context of one of them."""
        executors = [info.address for info in context.getTaskInfos()]
        return cls(executors, context.partitionId())

    @property
    def hosts(self) -> list[str]:
        return [executor.rpartition(":")[0] for executor in self.executors]

    @property
    def host(self) -> str:
        return self.hosts[self.own]

    @property
    def node_rank(self) -> int:
        """The number of the node; those of one host are consecutive."""
        return node_order(self.hosts).index(self.own)

    @property
    def tasks_of_executor(self) -> int:
        """How many of the tasks share this one's executor."""
        return self.executors.count(self.executors[self.own])


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
    """Check what the ranks need first, have the zygote start, and return the node's share."""
    use_host_name(placement.host)
    if spec.environment is None:
        check_interpreter()
    check_gpu_type(spec)
    share = _share(spec, placement)
    if spec.environment is None:
        _start_zygote(share, zygote_owner())
    return share


def _share(spec: TaskSpec, placement: Placement) -> NodeShare:
    from pyspark import SparkFiles

    files = os.path.abspath(SparkFiles.getRootDirectory())
    hadoop = sent_hadoop_configuration()
    return replace(
        spec.share,
        node_rank=placement.node_rank,
        host=placement.host,
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
        modules=unpack_modules(spec.modules) if spec.modules else "",
    )
    with (
        prepare_environment(spec) as prepared,
        _dataset_file(spec, batches) as data,
        program_file(spec.program) as program,
        _left_files_named(node),
    ):
        about_memory = warnings_about_memory(spec, placement.tasks_of_executor)
        warnings = (*node_warnings(replaced), *about_memory)
        yield Provisions(prepared.interpreter, prepared.software, program, data, warnings)


@contextlib.contextmanager
def _dataset_file(spec: TaskSpec, batches: Iterator[Any]) -> Iterator[BinaryIO | None]:
    """Write the rows into a file on one of Spark's local disks, for the node's ranks to map."""
    if not spec.datasets:
        for _ in batches:
            pass
        yield None
        return
    from distributor.data.chunk_file import write_chunks

    with write_chunks(batches, spec.datasets, spec.share.ranks_per_node, local_folder()) as file:
        yield file


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
