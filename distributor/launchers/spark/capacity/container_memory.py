"""Whether executor containers have memory for ranks, according to Spark's configuration.

Ranks live outside the executor's Java heap. On YARN and Kubernetes the container's bound is heap,
overhead, off-heap memory and PySpark's memory; the standalone cluster sets no bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from distributor.core.resources import format_bytes
from distributor.core.text import counted
from distributor.node.agent.memory import JVM, MIB, PYTHON_DAEMON, PYTHON_WORKER, min_memory
from distributor.spark.sizes import size_in_bytes

HEAP, OVERHEAD = "spark.executor.memory", "spark.executor.memoryOverhead"
FACTOR, MINIMUM = "spark.executor.memoryOverheadFactor", "spark.executor.minMemoryOverhead"
KUBERNETES_FACTOR = "spark.kubernetes.memoryOverheadFactor"
PYSPARK = "spark.executor.pyspark.memory"
EXECUTORS = "spark.executor.instances"


def container_shortage(
    conf: Callable[[str], str | None], tasks: int, ranks_per_task: int, *, warm: bool
) -> str | None:
    """Return why the executors' containers are too small for a run, and what to set."""
    if not (conf("spark.master") or "").startswith(("yarn", "k8s://")):
        return None
    overhead, source = _overhead(conf)
    room = overhead + size_in_bytes(conf(PYSPARK) or "0", "m")
    # However Spark places the tasks, at least one executor has this many.
    tasks_here = math.ceil(tasks / int(conf(EXECUTORS) or 2))
    ranks = tasks_here * ranks_per_task
    of_spark = JVM + PYTHON_DAEMON + tasks_here * PYTHON_WORKER
    needed = of_spark + min_memory(ranks, tasks_here, warm=warm)
    if needed <= room:
        return None
    wanted = math.ceil((needed - room + overhead) / MIB)
    return (
        f"An executor's container has {format_bytes(room)} beside its Java heap ({source}), and "
        f"{counted(ranks, 'rank')} in it, with Spark's own processes, need at least "
        f"{format_bytes(needed)}: Python and torch alone, without model, data or CUDA. The cluster "
        "manager may kill the executor (exit codes 137 and 143). Make the session with "
        f"{OVERHEAD}={wanted}m, and what your training needs on top."
    )


def _overhead(conf: Callable[[str], str | None]) -> tuple[int, str]:
    """Return the overhead of executors on YARN and Kubernetes (bytes), and what sets it."""
    if value := conf(OVERHEAD):
        return size_in_bytes(value, "m"), f"{OVERHEAD}={value}"
    heap = conf(HEAP) or "1g"
    on_kubernetes = (conf("spark.master") or "").startswith("k8s://")
    general = conf(FACTOR)
    factor = general or (on_kubernetes and conf(KUBERNETES_FACTOR)) or "0.1"
    minimum = conf(MINIMUM) or "384m"
    size = max(int(float(factor) * size_in_bytes(heap, "m")), size_in_bytes(minimum, "m"))
    return size, f"{OVERHEAD} is unset: {factor} of {HEAP}={heap}, at least {minimum}"
