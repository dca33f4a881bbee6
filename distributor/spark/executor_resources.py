"""Resources of executors that Spark starts for one run, by the names of Spark's properties."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any


def size_in_bytes(text: str, unit: str) -> int:
    """Return a size such as ``1g`` or ``512m`` in bytes."""
    found = re.fullmatch(r"(\d+)([bkmgtp]?)b?", text.strip().lower())
    if not found:
        raise ValueError(f"{text!r} is not a size, such as '1g'.")
    return int(found[1]) << 10 * "bkmgtp".index(found[2] or unit)


CORES, MEMORY = "spark.executor.cores", "spark.executor.memory"
OVERHEAD, OFF_HEAP = "spark.executor.memoryOverhead", "spark.memory.offHeap.size"
EXECUTOR_GPUS = "spark.executor.resource.gpu.amount"
DISCOVERY_SCRIPT = "spark.executor.resource.gpu.discoveryScript"
VENDOR = "spark.executor.resource.gpu.vendor"
TASK_CPUS, TASK_GPUS = "spark.task.cpus", "spark.task.resource.gpu.amount"
COUNTS = (CORES, EXECUTOR_GPUS, TASK_CPUS, TASK_GPUS)
SIZES = (MEMORY, OVERHEAD, OFF_HEAP)
NAMES = (*COUNTS, *SIZES, DISCOVERY_SCRIPT, VENDOR)


def check_executor_resources(name: str, resources: object) -> None:
    """Check that a mapping has names of properties that a resource profile can have, and values.

    Parameters
    ----------
    name : str
        The setting, for messages.
    resources : object
        The mapping, or None.
    """
    if resources is None:
        return
    if not isinstance(resources, Mapping):
        raise TypeError(f"{name} must be a mapping of Spark properties, but is {resources!r}.")
    for key, value in resources.items():
        if key not in NAMES:
            raise ValueError(
                f"{name} has {key!r}, which Spark cannot set for the executors of one run. It "
                f"takes {', '.join(NAMES)}."
            )
        if key in COUNTS and not _is_count(value):
            raise ValueError(f"{name}[{key!r}] must be a positive integer, but is {value!r}.")
        if key in SIZES and not _is_size(value):
            raise ValueError(f"{name}[{key!r}] must be a size such as '8g', but is {value!r}.")
        if not isinstance(value, (str, int)) or not str(value).strip():
            raise ValueError(f"{name}[{key!r}] must have a value, but is {value!r}.")
    if TASK_GPUS in resources and EXECUTOR_GPUS not in resources:
        raise ValueError(f"{name} has {TASK_GPUS!r}, so it must have {EXECUTOR_GPUS!r}, too.")


def _is_count(value: object) -> bool:
    text = str(value).strip()
    return not isinstance(value, bool) and text.isdecimal() and int(text) > 0


def _is_size(value: object) -> bool:
    try:
        return size_in_bytes(str(value), "m") > 0
    except ValueError:
        return False


def executor_requests(conf: Callable[[str], str | None]) -> Any:
    """Return the requests of a resource profile that properties describe.

    Parameters
    ----------
    conf : callable
        Returns the value of a property, or None.
    """
    from pyspark.resource import ExecutorResourceRequests

    requests = ExecutorResourceRequests()
    if cores := conf(CORES):
        requests.cores(int(cores))
    for key, request in (
        (MEMORY, requests.memory),
        (OVERHEAD, requests.memoryOverhead),
        (OFF_HEAP, requests.offheapMemory),
    ):
        if size := conf(key):
            unit = "b" if key == OFF_HEAP else "m"  # that Spark assumes if there is none
            request(f"{size_in_bytes(size, unit) // 2**20}m")
    if amount := conf(EXECUTOR_GPUS):
        script, vendor = conf(DISCOVERY_SCRIPT) or "", conf(VENDOR) or ""
        requests.resource("gpu", int(float(amount)), script, vendor)
    return requests
