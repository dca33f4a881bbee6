"""Ray clusters as the functions that drive them see them, and what is left of them later."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import psutil

from distributor.rank.context import worker_context
from support.waiting import assert_gone, until


def describe() -> dict[str, Any]:
    """Describe the cluster that this function drives, and all processes and files of this node."""
    import ray

    pid = ray.remote(num_cpus=0)(lambda: os.getpid())
    scratch = Path(worker_context().scratch)
    # Each node has a process that watches the others.
    children = psutil.Process().children(recursive=True)
    return {
        "address": os.environ["RAY_ADDRESS"],
        "nodes": sorted(node["NodeName"] for node in ray.nodes() if node["Alive"]),
        "cpus": ray.cluster_resources()["CPU"],
        "pids": [os.getpid(), *(child.pid for child in children), ray.get(pid.remote())],
        "folders": [str(scratch), *(str(path.resolve()) for path in scratch.glob("elsewhere"))],
    }


def assert_files_and_processes_ended(cluster: dict[str, Any]) -> None:
    """Check that no process and no file of a cluster is left."""
    assert len(cluster["pids"]) > 4, "the rank, ray start, the GCS, the raylet, and a worker"
    assert_gone(cluster["pids"])
    until(lambda: not any(Path(folder).exists() for folder in cluster["folders"]), "files are left")


def assert_ended(cluster: dict[str, Any]) -> None:
    """Check that no process, no port and no file of a cluster of this host is left."""
    assert_files_and_processes_ended(cluster)
    host, _, port = cluster["address"].rpartition(":")
    with socket.socket() as client:
        assert client.connect_ex((host, int(port))) != 0, "the cluster's port is open"


def train_with_ray(storage: str) -> dict[str, Any]:
    """Run Ray Data, and two ranks of Ray Train, one on each node."""
    import ray.data
    import ray.train.torch

    def square(row: dict[str, int]) -> dict[str, int]:
        return {"square": row["id"] ** 2}

    def add_ranks() -> None:
        import torch

        rank = ray.train.get_context().get_world_rank()
        values = torch.tensor([rank + 1.0, float(ray.train.get_context().get_local_rank() == 0)])
        torch.distributed.all_reduce(values)
        sum_of_ranks, hosts = values.tolist()
        checkpoint = ray.train.Checkpoint(storage)  # without one, the result has no metrics
        ray.train.report({"sum_of_ranks": sum_of_ranks, "hosts": hosts}, checkpoint=checkpoint)

    result = ray.train.torch.TorchTrainer(
        add_ranks,
        scaling_config=ray.train.ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        run_config=ray.train.RunConfig(storage_path=storage),
    ).fit()
    assert result.metrics is not None
    return {"sum_of_squares": ray.data.range(100).map(square).sum("square"), **result.metrics}


def nodes_used(count: int) -> list[dict[str, Any]]:
    """Run tasks at the same time, each on another node, and describe their processes."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def look() -> dict[str, Any]:
        context = ray.get_runtime_context()
        folder = str(Path(context.get_temp_dir()).parent)
        return {"node": context.get_node_id(), "pid": os.getpid(), "folder": folder}

    group = placement_group([{"CPU": 1}] * count, strategy="STRICT_SPREAD")
    ray.get(group.ready(), timeout=120)
    strategies = [PlacementGroupSchedulingStrategy(group, index) for index in range(count)]
    tasks = [
        ray.remote(num_cpus=1, scheduling_strategy=strategy)(look).remote()
        for strategy in strategies
    ]
    found: list[dict[str, Any]] = ray.get(tasks, timeout=120)
    return found


def assert_nodes_ended(nodes: list[dict[str, Any]]) -> None:
    """Check that nothing is left of the tasks' processes, and of their nodes' files."""
    assert_gone(node["pid"] for node in nodes)
    folders = {node["folder"] for node in nodes}
    assert len(folders) == len(nodes), "each node has a folder of its own"
    until(lambda: not any(Path(folder).exists() for folder in folders), "files are left")
