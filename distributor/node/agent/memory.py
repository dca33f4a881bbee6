"""The memory that ranks need at least, and whether this container has it.

The figures were measured with torch 2.13 for CPUs, Python 3.11 and PySpark 4.3, as memory of a
process's own, for ranks that train the smallest model by DDP over gloo. They are lower bounds:
models, data, loaders' workers and all that CUDA takes of the host's memory come on top.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator

from distributor.core.resources import container_memory, format_bytes
from distributor.core.text import counted
from distributor.wire.messages import NodeWarning

MIB = 2**20
FORKED_RANK = 110 * MIB
"""A rank that was forked from the warm process."""
FRESH_RANK = 225 * MIB
"""A rank that has imported torch itself."""
WARM_PROCESS = 150 * MIB
"""The warm process, with torch imported."""
FRESH_PARENT = 20 * MIB
"""The parent of a task's fresh ranks."""
PYTHON_WORKER = 60 * MIB
"""A Spark task's Python process, with pyarrow imported."""
PYTHON_DAEMON = 30 * MIB
"""The parent of an executor's Python processes."""
JVM = 170 * MIB
"""An executor's JVM beside its heap: classes, code, stacks and buffers."""
ADDRESS_SPACE = 1100 * MIB
"""Addresses of a rank, which are many more than its memory."""
MORE_MEMORY = (
    "on YARN and Kubernetes raise spark.executor.memoryOverhead, elsewhere the container's limit"
)


def least_memory(ranks: int, tasks: int, *, warm: bool) -> int:
    """Return what an executor's Python processes will need at least for a run (bytes).

    Parameters
    ----------
    ranks : int
        How many ranks run in the executor.
    tasks : int
        How many tasks they belong to.
    warm : bool
        Whether they are forked from a warm process.
    """
    if warm:
        return WARM_PROCESS + ranks * FORKED_RANK
    return tasks * FRESH_PARENT + ranks * FRESH_RANK


def memory_warnings(
    ranks: int, tasks: int, *, warm: bool, is_warm: Callable[[], bool]
) -> Iterator[NodeWarning]:
    """Compare what ranks will need with what is left here.

    Parameters
    ----------
    ranks, tasks, warm
        As `least_memory` has them, of all that shares this container.
    is_warm : callable
        Returns whether the warm process is there already; called only if it matters.
    """
    needed, bound = least_memory(ranks, tasks, warm=warm), container_memory()
    if bound and bound.left < needed and warm and is_warm():
        needed -= WARM_PROCESS
    if bound and bound.left < needed:
        yield NodeWarning(
            f"{counted(ranks, 'rank')} in this container need at least {format_bytes(needed)} of "
            "memory, for Python and torch alone, without model, data or CUDA. It has less left, "
            f"and the kernel kills a process when it is full: {MORE_MEMORY}.",
            f"{format_bytes(bound.left)} left of {format_bytes(bound.most)}",
        )
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY and addresses < ADDRESS_SPACE:
        yield NodeWarning(
            f"a process may use {format_bytes(addresses)} of addresses (RLIMIT_AS), and a rank "
            f"needs {format_bytes(ADDRESS_SPACE)} at least. If spark.executor.pyspark.memory is "
            "what limits it, leave that unset and set spark.executor.memoryOverhead instead; Spark "
            "divides it by the executor's cores."
        )
