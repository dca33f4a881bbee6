"""Which GPUs ranks see: ``CUDA_VISIBLE_DEVICES`` inherited, set by the user, and types of GPUs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.cuda import needs_gpu, only_on_gpu, run_program

from distributor.core.gpus import GPUType, gpu_names, has_nvml, is_of_type

pytestmark = [*needs_gpu, only_on_gpu]

PROGRAM = """
import json, os, sys
import cloudpickle
from distributor import TorchDistributor

def seen():
    import torch
    return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()

try:
    found = TorchDistributor(1, local_mode=True, timeout=120, {settings}).run(seen)
except Exception as error:
    found = [type(error).__name__, str(error)]
print("FOUND " + json.dumps(found))
"""


def found(mask: str | None, settings: str = "use_gpu=True") -> Any:
    """Return what a rank sees if the driver has inherited a mask."""
    done = run_program(PROGRAM.replace("{settings}", settings), CUDA_VISIBLE_DEVICES=mask)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")] or [""]
    assert line, done.stderr[-4000:]
    return json.loads(line.removeprefix("FOUND "))


def uuid() -> str:
    """Return the name by which a mask can select the first GPU."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


@pytest.mark.parametrize(
    ("mask", "settings", "expected"),
    [
        (None, "use_gpu=True", ["0", 1]),
        ("UUID", "use_gpu=True", ["UUID", 1]),
        ("0", "use_gpu=False", ["0", 1]),
        ("0", 'use_gpu=False, env={"CUDA_VISIBLE_DEVICES": ""}', ["", 0]),
    ],
)
def test_the_gpus_that_a_rank_sees(mask: str | None, settings: str, expected: list[Any]) -> None:
    of_gpu = uuid()
    mask = of_gpu if mask == "UUID" else mask
    assert found(mask, settings) == [of_gpu if each == "UUID" else each for each in expected]


def test_without_visible_gpus_a_run_that_needs_one_is_refused() -> None:
    kind, message = found("")
    assert kind == "RuntimeError"
    assert "GPUs were unable to be found on the driver" in message


def test_the_type_of_a_gpu_comes_from_nvml() -> None:
    import torch

    if not has_nvml():
        pytest.skip("needs nvidia-ml-py")
    assert torch.cuda.get_device_name(0) in gpu_names()
    here = [kind.value for kind in GPUType if is_of_type(torch.cuda.get_device_name(0), kind.value)]
    other = next(kind.value for kind in GPUType if kind.value not in here)
    kind, message = found(None, f'use_gpu=True, gpu_type="{other}"')
    assert kind == "RuntimeError"
    assert torch.cuda.get_device_name(0) in message
    for each in here:
        assert found(None, f'use_gpu=True, gpu_type="{each}"') == ["0", 1]
