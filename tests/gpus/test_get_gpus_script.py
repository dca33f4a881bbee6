"""conf/get_gpus.sh, the GPU discovery script for Spark."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.gpus import write_script

from distributor.node.agent.worker_env import mask_entries, visible_devices

GET_GPUS = Path(__file__).parents[2] / "conf" / "get_gpus.sh"

NVIDIA_SMI = (
    'test "$1" = --query-gpu=index && test "$2" = --format=csv,noheader || exit 6',
    "printf '0\\n1\\n2\\n3\\n'",
)
"""The lines of a script that acts as nvidia-smi on a machine with four GPUs."""


def run_get_gpus(path: str, mask: str | None) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": path} | ({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})
    return subprocess.run(
        ["/bin/sh", str(GET_GPUS)], env=environment, capture_output=True, text=True, timeout=30
    )


needs_get_gpus = pytest.mark.skipif(not GET_GPUS.exists(), reason="there is no conf/get_gpus.sh")


@needs_get_gpus
@pytest.mark.parametrize(
    ("mask", "addresses"),
    [
        (None, ["0", "1", "2", "3"]),
        (" 3 , 2 ", ["0", "1"]),
        ("GPU-11,MIG-22", ["0", "1"]),
        ("1,-1,2", ["0"]),
        ("", []),
    ],
)
def test_addresses_are_positions_in_the_mask(
    mask: str | None, addresses: list[str], tmp_path: Path
) -> None:
    write_script(tmp_path, "nvidia-smi", *NVIDIA_SMI)
    done = run_get_gpus(f"{tmp_path}:/usr/bin:/bin", mask)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"name": "gpu", "addresses": addresses}
    entries = tuple(addresses) if mask is None else mask_entries(mask)[: len(addresses)]
    assert visible_devices(addresses, mask) == entries


@needs_get_gpus
@pytest.mark.parametrize("nvidia_smi", [None, ("echo 'Failed to initialize NVML'", "exit 9")])
def test_a_failed_discovery_prints_nothing(
    nvidia_smi: tuple[str, ...] | None, tmp_path: Path
) -> None:
    """Spark then reports the failure; it would accept an empty list as the answer."""
    if nvidia_smi:
        write_script(tmp_path, "nvidia-smi", *nvidia_smi)
    done = run_get_gpus(str(tmp_path), mask=None)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "nvidia-smi" in done.stderr
