"""Runs a rank on the CPUs of a NUMA node: that of its GPU, or its share of the machine's."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from distributor.core.gpus import cpus_near
from distributor.node.process.fork_reset import set_thread_counts

_NODES = Path("/sys/devices/system/node")


def bind_to_numa_node(uses_gpus: bool) -> None:
    """Restrict this process to the CPUs near its GPU, or to its share of the NUMA nodes.

    It stays as it is if that would change nothing, or if the nodes are not known.
    """
    allowed = os.sched_getaffinity(0)
    local_rank, ranks = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if uses_gpus:
        gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        near = cpus_near(gpus[local_rank % len(gpus)])
    else:
        near = share_of_nodes(_cpus_of_nodes(allowed), local_rank, ranks)
    if (cpus := near & allowed) and cpus != allowed:
        os.sched_setaffinity(0, cpus)
        if "torch" in sys.modules:  # in a forked rank, which may have more threads than CPUs now
            set_thread_counts()


def share_of_nodes(nodes: Sequence[set[int]], local_rank: int, ranks: int) -> set[int]:
    """Return the CPUs of a rank's share of the nodes: some of them, or one for several ranks."""
    first, end = (rank * len(nodes) // ranks for rank in (local_rank, local_rank + 1))
    return set().union(*nodes[first : max(end, first + 1)])


def _cpus_of_nodes(allowed: set[int]) -> list[set[int]]:
    """Return the CPUs of each NUMA node that has any of those allowed."""
    lists = sorted(_NODES.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    found = (_parse_cpus(path.read_text()) & allowed for path in lists)
    return [cpus for cpus in found if cpus]


def _parse_cpus(text: str) -> set[int]:
    """Parse a list such as "0-3,8-11"."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {cpu for low, _, high in ranges for cpu in range(int(low), int(high or low) + 1)}
