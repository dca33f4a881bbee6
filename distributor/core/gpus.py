"""The GPUs of this machine, as NVIDIA's management library (NVML) reports them.

Unlike CUDA's own calls, NVML leaves no state in the process that calls it.
"""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from distributor.core.text import counted


class GPUType(str, enum.Enum):
    """Types of GPUs that a run can require."""

    T4 = "T4"
    V100 = "V100"
    A10 = "A10"
    A100 = "A100"
    L4 = "L4"
    L40S = "L40S"
    H100 = "H100"
    H200 = "H200"
    B200 = "B200"


class GPUUsage(NamedTuple):
    """How busy a GPU is."""

    utilization: float  # percentage of time in which a kernel ran
    memory_used: float  # bytes
    memory_total: float


class DriverVersion(NamedTuple):
    """The version of this machine's NVIDIA driver."""

    driver: str  # such as "550.54.15"
    cuda: str  # the newest that it supports, such as "12.4"


def driver_version() -> DriverVersion | None:
    """Return the version of the NVIDIA driver; None under the conditions of `gpu_names`."""
    with _nvml() as nvml:
        if nvml is None:
            return None
        try:
            cuda = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
            return DriverVersion(
                str(nvml.nvmlSystemGetDriverVersion()), f"{cuda // 1000}.{cuda % 1000 // 10}"
            )
        except nvml.NVMLError:
            return None


def gpu_names() -> list[str]:
    """Return the product names of this machine's GPUs; none without a driver or nvidia-ml-py."""
    with _nvml() as nvml:
        return [] if nvml is None else [_name_of(nvml, index) for index in range(_count(nvml))]


def gpu_usage() -> list[GPUUsage]:
    """Return the usage of each GPU of this machine that answers, empty as in `gpu_names`."""
    with _nvml() as nvml:
        if nvml is None:
            return []
        return [usage for index in range(_count(nvml)) if (usage := _usage_of(nvml, index))]


def describe(names: Sequence[str]) -> str:
    """Return GPUs as text, such as "2 x NVIDIA A10G"."""
    counts = {name: list(names).count(name) for name in names}
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "no GPU"


def is_of_type(name: str, gpu_type: str) -> bool:
    """Return whether a GPU of this name is of a type; an A10G is an "A10"."""
    return re.search(rf"(?<![A-Z0-9]){re.escape(gpu_type)}G?(?![A-Z0-9])", name.upper()) is not None


def missing_gpus(gpu_type: str, wanted: int) -> str | None:
    """Say what is missing if this machine has fewer GPUs of a type than wanted."""
    gpus = counted(wanted, f"GPU of type {gpu_type}", f"GPUs of type {gpu_type}")
    if not has_nvml():
        return (
            f"the run needs {gpus}, and without the package nvidia-ml-py nobody can say whether "
            f"there are any: install it there ('pip install nvidia-ml-py')"
        )
    names = gpu_names()
    if sum(is_of_type(name, gpu_type) for name in names) >= wanted:
        return None
    return f"the run needs {gpus}, and there is {describe(names)}"


def has_nvml() -> bool:
    """Return whether ``nvidia-ml-py`` is installed, without which no GPU is found."""
    return find_spec("pynvml") is not None


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """Initialize NVML; None without its Python package or the driver's library."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        yield None
        return
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _count(nvml: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError:
        return 0


def _usage_of(nvml: Any, index: int) -> GPUUsage | None:
    try:
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(device)
        utilization = nvml.nvmlDeviceGetUtilizationRates(device).gpu
    except nvml.NVMLError:
        return None
    return GPUUsage(utilization, memory.used, memory.total)


def _name_of(nvml: Any, index: int) -> str:
    try:
        device = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError:
        return "a GPU that does not answer"
    try:
        return str(nvml.nvmlDeviceGetName(device))
    except nvml.NVMLError:
        return "a GPU without a name"
