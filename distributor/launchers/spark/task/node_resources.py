"""What a node has for its ranks: an interpreter with packages, GPUs, and memory."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from distributor.core.addresses import host_name
from distributor.core.gpus import missing_gpus
from distributor.core.versions import software
from distributor.errors import ExecutorNotReady
from distributor.launchers.spark.task.task_spec import TaskSpec
from distributor.node.agent.memory import memory_warnings
from distributor.node.agent.worker_env import visible_devices
from distributor.node.environment import resolve
from distributor.node.environment.cache import with_default_cache
from distributor.node.environment.resolve import PreparedEnvironment
from distributor.node.process import zygote
from distributor.node.process.spawner import Interpreter
from distributor.node.process.supervisor import is_supported
from distributor.spark.executor_modules import spark_files_folder
from distributor.wire.messages import NodeWarning


def prepare_environment(spec: TaskSpec) -> AbstractContextManager[PreparedEnvironment]:
    """Make the interpreter ready with which this node's ranks run."""
    if spec.environment is None:
        return nullcontext(PreparedEnvironment(Interpreter.current(), software()))
    variables = with_default_cache({**os.environ, **spec.share.env}, spec.cache_dir)
    deadline = time.monotonic() + spec.share.start_timeout
    spark_files = spark_files_folder()
    entries = [Path(entry).absolute() for entry in sys.path]
    beside = [str(entry) for entry in entries if entry.is_relative_to(spark_files)]
    if isinstance(spec.environment, str):
        return resolve.use_packed(spark_files / spec.environment, variables, deadline, beside)
    return resolve.use_requirements(spec.environment, variables, deadline, beside)


def check_gpu_type(spec: TaskSpec) -> None:
    """Check that this node has the GPUs that the run requires."""
    if not (spec.use_gpu and spec.gpu_type):
        return
    if missing := missing_gpus(spec.gpu_type, spec.share.ranks_per_node):
        raise ExecutorNotReady(f"On {host_name()} {missing}.")


def assigned_gpus(spec: TaskSpec, node_rank: int, context: Any) -> tuple[str, ...]:
    """Return the GPUs of this node's ranks, as entries for ``CUDA_VISIBLE_DEVICES``."""
    if not spec.use_gpu:
        return ()
    if spec.driver_gpus:
        first = node_rank * spec.share.ranks_per_node
        return spec.driver_gpus[first : first + spec.share.ranks_per_node]
    addresses = context.resources()["gpu"].addresses
    return visible_devices(addresses, os.environ.get("CUDA_VISIBLE_DEVICES"))


def warnings_about_memory(spec: TaskSpec, num_tasks: int) -> Iterator[NodeWarning]:
    """Compare the memory that all ranks of this executor need with the memory that is left."""
    if not spec.check_memory:
        return iter(())
    return memory_warnings(
        num_tasks * spec.share.ranks_per_node,
        num_tasks,
        warm=spec.share.warm and is_supported(),
        is_warm=lambda: zygote.is_warm(os.getppid()),
    )
