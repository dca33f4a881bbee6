"""The files of conf/ on the clusters of tests: with smaller amounts, otherwise unchanged."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.pages import ROOT

CONF = ROOT / "conf"
AMOUNTS = {
    "spark.executor.instances": "1",
    "spark.executor.cores": "2",
    "spark.executor.resource.gpu.amount": "2",
    "spark.task.resource.gpu.amount": "2",
    "spark.task.cpus": "2",
    "spark.executor.memory": "512m",
    "spark.executor.memoryOverhead": "1500m",
}
TRAIN = """
import os
import sys
import tempfile

from pyspark.sql import SparkSession

from distributor import TorchDistributor, train


def train_func():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(())
    dist.all_reduce(total)
    with tempfile.TemporaryDirectory() as folder:
        train.report({}, checkpoint=train.Checkpoint.from_directory(folder))
    return total.item(), os.environ["CUDA_VISIBLE_DEVICES"]


spark = SparkSession.builder.getOrCreate()
ranks = TorchDistributor(2, local_mode=False, use_gpu=True, storage_path=sys.argv[1])
found = ranks.run(train_func)
assert found == (2, "0,1"), found
spark.stop()
"""
"""A program for one executor with two GPUs; its argument is a folder for checkpoints."""


def properties(
    name: str, folder: Path, values: Mapping[str, str], further: Mapping[str, str]
) -> str:
    """Return a file of conf/ with values replaced, and further properties added.

    Executors can read the folder: the command nvidia-smi is written to it if this machine has none.
    """
    text = (CONF / name).read_text()
    for key, value in {**AMOUNTS, **values}.items():
        text, count = re.subn(rf"^({re.escape(key)}\s+)\S.*$", rf"\g<1>{value}", text, flags=re.M)
        assert count == 1, key
    if shutil.which("nvidia-smi") is None:  # and so the nodes of this machine have none either
        stub = folder / "nvidia-smi"
        stub.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
        stub.chmod(0o755)
        further = {**further, "spark.executorEnv.PATH": f"{folder}:/usr/local/bin:/usr/bin:/bin"}
    return text + "".join(f"{key} {value}\n" for key, value in further.items())


def pod_template() -> dict[str, Any]:
    """Return the pod template of conf/, for nodes without GPUs."""
    import yaml

    pod: dict[str, Any] = yaml.safe_load((CONF / "executor-pod-template.yaml").read_text())
    pod["spec"]["volumes"][0]["emptyDir"]["sizeLimit"] = "1Gi"
    for key in ("nodeSelector", "tolerations"):
        del pod["spec"][key]
    [container] = pod["spec"]["containers"]
    del container["resources"]
    return pod
