"""The GPUs of this machine, as NVIDIA's management library (NVML) reports them.

Unlike CUDA's own calls, NVML leaves no state in the process that calls it.
"""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

from distributor.core.text import counted
from distributor.serverless_errors import GPUTypeError

AnswerT = TypeVar("AnswerT")

MAX_CPUS = 4096  # of a machine
_ACCELERATOR = re.compile(r"(?:GPU_)?(\d+)x(\w+)", re.IGNORECASE)


def split_accelerator(kind: Any) -> tuple[int | None, Any]:
    """Split "GPU_8xH100" into the number of GPUs of a node and their type."""
    found = _ACCELERATOR.fullmatch(kind) if isinstance(kind, str) else None
    return (int(found[1]), found[2]) if found else (None, kind)


class _Named(str, enum.Enum):
    """Names of which the case does not matter."""

    @classmethod
    def values(cls) -> list[str]:
        """Return all names."""
        return [each.value for each in cls]

    @classmethod
    def _missing_(cls, value: object) -> Any:
        name = str(value).upper()
        for each in cls:
            if name in (each.value.upper(), *each._other_names()):
                return each
        raise GPUTypeError(f"{value!r} is not a {cls.__name__}: choose one of {', '.join(cls)}.")

    def _other_names(self) -> tuple[str, ...]:
        return ()


class GPUType(_Named):
    """Types of GPUs that a run can require.

    Examples
    --------
    >>> GPUType("a10g")
    <GPUType.A10: 'A10'>
    """

    T4 = "T4"
    V100 = "V100"
    A10 = "A10"
    A100 = "A100"
    L4 = "L4"
    L40S = "L40S"
    H100 = "H100"
    H200 = "H200"
    B200 = "B200"
    B300 = "B300"

    @classmethod
    def names(cls) -> list[str]:
        """Return all names in lower case."""
        return [each.lower() for each in cls.values()]

    def _other_names(self) -> tuple[str, ...]:
        return {GPUType.A10: ("A10G",), GPUType.H100: ("H100_80GB",)}.get(self, ())


class AcceleratorType(_Named):
    """Databricks' types of nodes with GPUs, by the number and the type of their GPUs.

    Follows ``databricks.air.compute.AcceleratorType``: https://pypi.org/project/databricks-sdk-air.

    Examples
    --------
    >>> AcceleratorType("gpu_8xh100").gpus_per_node
    8
    """

    GPU_1xA10 = "GPU_1xA10"
    GPU_1xH100 = "GPU_1xH100"
    GPU_8xH100 = "GPU_8xH100"
    GPU_8xB300 = "GPU_8xB300"

    @property
    def gpu_type(self) -> GPUType:
        """The type of a node's GPUs."""
        return GPUType(split_accelerator(self.value)[1])

    @property
    def gpus_per_node(self) -> int:
        """The number of a node's GPUs."""
        number, _ = split_accelerator(self.value)
        assert number is not None, "each name has it"
        return number

    @classmethod
    def from_gpu_type(cls, gpu_type: GPUType, num_accelerators: int) -> AcceleratorType:
        """Return the type of node for so many GPUs of a type: a single GPU has a node of its own.

        Parameters
        ----------
        gpu_type : GPUType
            The type of the GPUs.
        num_accelerators : int
            Their number.

        Raises
        ------
        GPUTypeError
            If Databricks has no nodes with such GPUs.
        """
        alike = [each for each in cls if each.gpu_type == gpu_type]
        if not alike:
            raise GPUTypeError(
                f"No AcceleratorType has GPUs of type {gpu_type.value}: choose one of "
                f"{', '.join(cls)}."
            )
        return alike[0] if num_accelerators == 1 else alike[-1]


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

    def version(nvml: Any) -> DriverVersion | None:
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
        driver = str(nvml.nvmlSystemGetDriverVersion())
        return DriverVersion(driver, f"{cuda // 1000}.{cuda % 1000 // 10}")

    return _ask_nvml(version, None)


def gpu_names() -> list[str]:
    """Return the product names of this machine's GPUs; none without a driver or nvidia-ml-py."""

    def names(nvml: Any) -> list[str]:
        return [_name_of(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]

    return _ask_nvml(names, [])


def gpu_usage() -> list[GPUUsage]:
    """Return the usage of each GPU of this machine that answers, empty as in `gpu_names`."""

    def usages(nvml: Any) -> list[GPUUsage]:
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            with contextlib.suppress(nvml.NVMLError):
                device = nvml.nvmlDeviceGetHandleByIndex(index)
                memory = nvml.nvmlDeviceGetMemoryInfo(device)
                utilization = nvml.nvmlDeviceGetUtilizationRates(device).gpu
                found.append(GPUUsage(utilization, memory.used, memory.total))
        return found

    return _ask_nvml(usages, [])


def cpus_near(gpu: str) -> set[int]:
    """Return the CPUs of a GPU's NUMA node; none if they are not known.

    Parameters
    ----------
    gpu : str
        An entry of ``CUDA_VISIBLE_DEVICES``.
    """

    def cpus(nvml: Any) -> set[int]:
        device = (
            nvml.nvmlDeviceGetHandleByIndex(int(gpu))
            if gpu.isdecimal()
            else nvml.nvmlDeviceGetHandleByUUID(gpu)
        )
        mask = nvml.nvmlDeviceGetCpuAffinity(device, MAX_CPUS // 64)
        return {cpu for cpu in range(MAX_CPUS) if mask[cpu // 64] >> cpu % 64 & 1}

    return _ask_nvml(cpus, set())


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


def _ask_nvml(question: Callable[[Any], AnswerT], default: AnswerT) -> AnswerT:
    """Return NVML's answer; the default without its package or a driver, or if a call fails."""
    try:
        import pynvml
    except ImportError:
        return default
    try:
        pynvml.nvmlInit()
        try:
            return question(pynvml)
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return default


def _name_of(nvml: Any, index: int) -> str:
    name = "a GPU that does not answer"
    with contextlib.suppress(nvml.NVMLError):
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        name = "a GPU without a name"
        name = str(nvml.nvmlDeviceGetName(device))
    return name
