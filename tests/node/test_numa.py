"""Ranks on the CPUs of a NUMA node."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distributor.node.worker.libraries import share_of_nodes

# Two NUMA nodes with a CPU each.
SHOWING_TWO_NODES = """
mount -t tmpfs none /sys/devices/system/node
for node in 0 1; do
    mkdir /sys/devices/system/node/node$node
    echo $node,${node}6-${node}7 > /sys/devices/system/node/node$node/cpulist
done
exec "$@"
"""
PROGRAM = """
import os, torch
from distributor import TorchDistributor

def cpus():
    import torch
    return sorted(os.sched_getaffinity(0)), torch.get_num_threads()

settings = dict(use_gpu=False, env={"OMP_NUM_THREADS": ""})
print(TorchDistributor(2, numa_binding=True, **settings).run_all(cpus))
print(TorchDistributor(2, **settings).run_all(cpus))
"""


@pytest.mark.parametrize(
    ("ranks", "shares"),
    [(1, [{0, 1, 2}]), (2, [{0}, {1, 2}]), (4, [{0}, {0}, {1}, {2}])],
)
def test_the_ranks_of_a_machine_share_its_nodes(ranks: int, shares: list[set[int]]) -> None:
    nodes = [{0}, {1}, {2}]
    assert [share_of_nodes(nodes, rank, ranks) for rank in range(ranks)] == shares
    assert share_of_nodes([], 0, ranks) == set()


@pytest.mark.slow
@pytest.mark.skipif(
    os.getuid() != 0 or not {0, 1} <= os.sched_getaffinity(0), reason="needs root and CPUs 0 and 1"
)
def test_ranks_are_bound_to_the_cpus_of_a_node(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    taskset = ["taskset", "--cpu-list", "0,1", sys.executable, str(program)]
    command = ["unshare", "--mount", "sh", "-ec", SHOWING_TWO_NODES, "sh", *taskset]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [
        "[([0], 1), ([1], 1)]",
        "[([0, 1], 2), ([0, 1], 2)]",
    ], done.stderr
