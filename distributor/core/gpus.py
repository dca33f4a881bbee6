"""The GPUs of this machine, as NVIDIA's management library (NVML) reports them.

Unlike CUDA's own calls, NVML leaves no state in the process that calls it.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from distributor.core.text import counted

LIBRARY = "libnvidia-ml.so.1"  # NVML, which comes with the driver
TEXT_BYTES = 96  # the longest texts that NVML returns
# Calls a function of NVML by its name, and returns whether it succeeded.
_Call = Callable[..., bool]


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
    text, cuda = ctypes.create_string_buffer(TEXT_BYTES), ctypes.c_int()
    with _nvml() as call:
        if not call("nvmlSystemGetDriverVersion", text, TEXT_BYTES):
            return None
        if not call("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(cuda)):
            return None
    return DriverVersion(_decoded(text), f"{cuda.value // 1000}.{cuda.value % 1000 // 10}")


def gpu_names() -> list[str]:
    """Return the product names of this machine's GPUs; none without a driver."""
    with _nvml() as call:
        return [_name_of(call, index) for index in range(_count(call))]


def gpu_usage() -> list[GPUUsage]:
    """Return the usage of each GPU of this machine that answers, empty as in `gpu_names`."""
    with _nvml() as call:
        return [usage for index in range(_count(call)) if (usage := _usage_of(call, index))]


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
    names = gpu_names()
    if sum(is_of_type(name, gpu_type) for name in names) >= wanted:
        return None
    return f"the run needs {gpus}, and there is {describe(names)}"


@contextlib.contextmanager
def _nvml() -> Iterator[_Call]:
    """Initialize NVML, and provide what calls its functions; without a driver, all calls fail."""
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError:
        yield lambda name, *args: False
        return

    def call(name: str, *args: object) -> bool:
        function = getattr(nvml, name, None)  # an old driver may lack it
        return function is not None and function(*args) == 0

    if not call("nvmlInitWithFlags", 0):
        yield lambda name, *args: False
        return
    try:
        yield call
    finally:
        call("nvmlShutdown")


def _count(call: _Call) -> int:
    count = ctypes.c_uint()
    return count.value if call("nvmlDeviceGetCount_v2", ctypes.byref(count)) else 0


def _device(call: _Call, index: int) -> ctypes.c_void_p | None:
    device = ctypes.c_void_p()
    return device if call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(device)) else None


def _usage_of(call: _Call, index: int) -> GPUUsage | None:
    memory = (ctypes.c_ulonglong * 3)()  # total, free, used
    rates = (ctypes.c_uint * 2)()  # of kernels, of memory
    device = _device(call, index)
    if device is None or not call("nvmlDeviceGetMemoryInfo", device, memory):
        return None
    if not call("nvmlDeviceGetUtilizationRates", device, rates):
        return None
    return GPUUsage(rates[0], memory[2], memory[0])


def _name_of(call: _Call, index: int) -> str:
    name = ctypes.create_string_buffer(TEXT_BYTES)
    if (device := _device(call, index)) is None:
        return "a GPU that does not answer"
    if not call("nvmlDeviceGetName", device, name, TEXT_BYTES):
        return "a GPU without a name"
    return _decoded(name)


def _decoded(text: ctypes.Array[ctypes.c_char]) -> str:
    return text.value.decode(errors="replace")
