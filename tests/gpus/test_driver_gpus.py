"""The GPUs of a driver without Spark: from ``CUDA_VISIBLE_DEVICES`` or the NVIDIA driver."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.gpus import TOO_MANY_PROCESSES, RunGpuDriver, check_numbers


def test_without_spark_the_mask_lists_the_gpus(run_gpu_driver: RunGpuDriver) -> None:
    facts, _ = run_gpu_driver(
        """
        facts["2"] = run_ranks(2, local_mode=True)
        facts["1"] = run_ranks(1, local_mode=True)
        facts["mask"] = os.environ["CUDA_VISIBLE_DEVICES"]
        facts["imported"] = [name for name in ("pyspark", "torch") if name in sys.modules]
        """,
        CUDA_VISIBLE_DEVICES="3,5",
    )
    check_numbers(facts["2"], 2, per_task=2)
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in facts["2"]] == ["3,5", "3,5"]
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in facts["1"]] == ["3"]
    assert facts["mask"] == "3,5"
    assert facts["imported"] == []


def test_without_spark_or_mask_the_driver_library_counts_the_gpus(
    run_gpu_driver: RunGpuDriver, nvml: Callable[..., str]
) -> None:
    facts, stderr = run_gpu_driver(
        """
        distributor = TorchDistributor(4)
        facts["num_processes"] = distributor.num_processes
        facts["ranks"] = distributor.run_all(rank_facts)
        facts["mask"] = os.environ.get("CUDA_VISIBLE_DEVICES")
        """,
        LD_LIBRARY_PATH=nvml(2),
    )
    assert facts["num_processes"] == 2
    check_numbers(facts["ranks"], 2, per_task=2)
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in facts["ranks"]] == ["0,1", "0,1"]
    assert facts["mask"] is None
    assert stderr.count(TOO_MANY_PROCESSES) == 1


@pytest.mark.parametrize("hidden", [False, True])
def test_no_gpu_anywhere(
    run_gpu_driver: RunGpuDriver, nvml: Callable[..., str], hidden: bool
) -> None:
    status, mask = ({}, {"CUDA_VISIBLE_DEVICES": "-1"}) if hidden else ({"init": 9}, {})
    facts, _ = run_gpu_driver(
        """
        facts["error"] = error_of(TorchDistributor, 1)
        facts["cpu"] = error_of(TorchDistributor, 1, use_gpu=False)
        """,
        LD_LIBRARY_PATH=nvml(2, **status),
        **mask,
    )
    types, message = facts["error"]
    assert types[0] == "RuntimeError"
    assert message.startswith("GPUs were unable to be found on the driver.")
    assert facts["cpu"] is None
