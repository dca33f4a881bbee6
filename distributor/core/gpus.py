"""The GPUs of this machine, as the NVIDIA driver's library reports them.

Unlike CUDA's own calls it leaves no state in the process that asks.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import re
from collections.abc import Iterator, Sequence
from typing import Any

from distributor.core.text import counted


class GPUType(str, enum.Enum):
    """Kinds of GPUs that can be asked for."""

    T4 = "T4"
    V100 = "V100"
    A10 = "A10"
    A100 = "A100"
    L4 = "L4"
    L40S = "L40S"
    H100 = "H100"
    H200 = "H200"
    B200 = "B200"


LIBRARY = "libnvidia-ml.so.1"
MAX_NAME = 96


def gpu_names() -> list[str]:
    """List what the GPUs of this machine are called, such as "NVIDIA H100 80GB HBM3"."""
    with _library() as nvml:
        count = ctypes.c_uint()
        if nvml is None or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        return [_name_of(nvml, index) for index in range(count.value)]


def gpu_usage() -> list[tuple[float, float, float]]:
    """List of each GPU how busy it is (percent), and its memory: used, and whole (bytes)."""
    with _library() as nvml:
        count = ctypes.c_uint()
        if nvml is None or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        return [usage for index in range(count.value) if (usage := _usage_of(nvml, index))]


def describe(names: Sequence[str]) -> str:
    """Write a list of GPUs for people."""
    counts = {name: list(names).count(name) for name in names}
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "no GPU"


def is_of_type(name: str, gpu_type: str) -> bool:
    """Tell whether a GPU with this name is of a type such as "A10", as an A10G is."""
    return re.search(rf"(?<![A-Z0-9]){re.escape(gpu_type)}G?(?![A-Z0-9])", name.upper()) is not None


def missing_gpus(gpu_type: str, wanted: int) -> str | None:
    """Say what this machine has instead, where it lacks so many GPUs of a type."""
    names = gpu_names()
    if sum(is_of_type(name, gpu_type) for name in names) >= wanted:
        return None
    gpus = counted(wanted, f"GPU of type {gpu_type}", f"GPUs of type {gpu_type}")
    return f"the run needs {gpus}, and there is {describe(names)}"


@contextlib.contextmanager
def _library() -> Iterator[Any]:
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError:
        nvml = None
    if nvml is None or nvml.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


def _usage_of(nvml: Any, index: int) -> tuple[float, float, float] | None:
    device, rates, memory = ctypes.c_void_p(), _Rates(), _Memory()
    if (
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0
        or nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(rates)) != 0
        or nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) != 0
    ):
        return None
    return rates.gpu, memory.used, memory.total


def _name_of(nvml: Any, index: int) -> str:
    device, name = ctypes.c_void_p(), ctypes.create_string_buffer(MAX_NAME)
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
        return "a GPU that does not answer"
    if nvml.nvmlDeviceGetName(device, name, MAX_NAME) != 0:
        return "a GPU without a name"
    return name.value.decode(errors="replace")
