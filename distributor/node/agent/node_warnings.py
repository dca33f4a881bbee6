"""Warnings about a node, which the driver shows to the user."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Callable, Iterator

from distributor.core.processes import lacking_for_memory_files, lacking_for_supervision
from distributor.core.resources import container_memory, format_bytes
from distributor.core.text import counted
from distributor.version import __version__
from distributor.wire.messages import NodeWarning


def node_warnings(replaced: str = "") -> Iterator[NodeWarning]:
    """Yield warnings about the package, the kernel and the sandbox of this node."""
    if replaced:
        yield NodeWarning(
            f"distributor {replaced} differs from the driver's source ({__version__}). Ranks there "
            "run the driver's source, which Spark ships to the executors. To avoid that, install "
            "the same version in both places."
        )
    if lacking := lacking_for_supervision():
        yield NodeWarning(
            f"the kernel or sandbox lacks {' and '.join(lacking)}. Each rank starts a new Python "
            "interpreter instead of being forked from a warm process, and processes that ranks "
            "start in sessions of their own can outlive the run if its agent is killed. Linux 5.3 "
            "or later without a filter on system calls has what is needed."
        )
    if lacking := lacking_for_memory_files():
        yield NodeWarning(
            f"the kernel or sandbox lacks {' and '.join(lacking)}. Values and reports of ranks are "
            f"written to temporary files in {tempfile.gettempdir()} instead of memory."
        )


# The figures were measured with torch 2.13 for CPUs, Python 3.11 and PySpark 4.3, as the private
# memory of a process, for ranks that train the smallest model by DDP over gloo. They are lower
# bounds: models, data, the workers of data loaders, and the host memory that CUDA uses come on top.

MIB = 2**20
FORKED_RANK = 110 * MIB
"""A rank that was forked from the zygote."""
FRESH_RANK = 225 * MIB
"""A rank that has imported torch itself."""
ZYGOTE = 150 * MIB
"""The zygote, with torch imported."""
SUPERVISOR = 20 * MIB
"""The parent of the fresh ranks of a task."""
PYTHON_WORKER = 60 * MIB
"""A Spark task's Python process, with pyarrow imported."""
PYTHON_DAEMON = 30 * MIB
"""The parent of an executor's Python processes."""
JVM = 170 * MIB
"""An executor's JVM without its heap: classes, code, stacks and buffers."""
ADDRESS_SPACE = 1100 * MIB
"""The address space of a rank, which is much larger than its memory."""
MORE_MEMORY = (
    "on YARN and Kubernetes raise spark.executor.memoryOverhead, elsewhere the container's limit"
)


def min_memory(ranks: int, tasks: int, *, warm: bool) -> int:
    """Return the minimum memory of an executor's Python processes for a run (bytes)."""
    if warm:
        return ZYGOTE + ranks * FORKED_RANK
    return tasks * SUPERVISOR + ranks * FRESH_RANK


def memory_warnings(
    ranks: int, tasks: int, *, warm: bool, is_warm: Callable[[], bool]
) -> Iterator[NodeWarning]:
    """Compare the memory that ranks will need with the memory that this container has left."""
    needed, limit = min_memory(ranks, tasks, warm=warm), container_memory()
    if limit and limit.left < needed and warm and is_warm():
        needed -= ZYGOTE
    if limit and limit.left < needed:
        yield NodeWarning(
            f"{counted(ranks, 'rank')} in this container need at least {format_bytes(needed)} of "
            "memory, for Python and torch alone, without model, data or CUDA. Less is left, and "
            f"the kernel kills a process when the memory is full: {MORE_MEMORY}.",
            f"{format_bytes(limit.left)} left of {format_bytes(limit.most)}",
        )
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY and address_space < ADDRESS_SPACE:
        yield NodeWarning(
            f"the address space of a process is limited to {format_bytes(address_space)} "
            f"(RLIMIT_AS), and a rank needs at least {format_bytes(ADDRESS_SPACE)}. If the limit "
            "comes from spark.executor.pyspark.memory, which Spark divides by the executor's "
            "cores, leave that unset and set spark.executor.memoryOverhead instead."
        )
