"""What a machine has, on the driver and on executors alike, and what is wrong with it.

Nothing heavy is imported: versions are read from files.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from distributor.core.addresses import resolve
from distributor.core.gpus import DriverVersion, describe, driver_version, gpu_names, has_nvml
from distributor.core.resources import SHARED_MEMORY, format_bytes
from distributor.core.spelling import Message
from distributor.core.text import counted
from distributor.core.versions import SET_PYTHON, release
from distributor.diagnosis.report import (
    HERE,
    Check,
    failure,
    hosts_text,
    not_checked,
    ok,
    warning,
)
from distributor.node.agent.memory import memory_warnings
from distributor.spark.java import how_to_install, java_above, java_here, java_major, problem_of

NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
PACKAGES = ("pyspark", "pyarrow", "pandas", "cloudpickle")
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which users choose a network interface."""
MIB, GIB = 2**20, 2**30
MIN_SHARED_MEMORY, ENOUGH_SHARED_MEMORY = 48 * MIB, 512 * MIB
"""Free bytes below which a check fails, and below which it warns. Docker's default is 64 MiB."""
MIN_DISK, ENOUGH_DISK = 256 * MIB, 2 * GIB
MIN_OPEN_FILES, ENOUGH_OPEN_FILES = 256, 1024
MIN_TORCH = (2, 4)
UNSUPPORTED_PANDAS = (3,)
"""The first pandas that no PySpark fully supports yet, as PySpark itself warns."""
MUST_BE_EQUAL = ("torch", "cloudpickle", "CUDA", "NCCL")
"""Versions that must be the same on all executors; others are only compared."""


@dataclass(frozen=True)
class Space:
    """The space of a file system."""

    folder: str
    free: int
    total: int


@dataclass(frozen=True)
class Machine:
    """What a machine has."""

    host: str
    python: str
    java: str
    java_path: str
    versions: Mapping[str, str]
    driver: DriverVersion | None
    has_nvml: bool
    gpus: tuple[str, ...]
    shared_memory: Space | None
    disks: tuple[Space, ...]
    open_files: int
    memory: tuple[str, ...]
    unresolved: str
    interfaces: Mapping[str, str]


@dataclass(frozen=True)
class Needs:
    """What a machine needs."""

    gpus: int = 0
    has_ranks: bool = True
    java: bool = False
    min_java: int = 0
    in_executor: bool = False


def examine(host: str, folders: Iterable[str], ranks: int, *, in_executor: bool) -> Machine:
    """Collect what this machine has."""
    java_path, java = java_above() if in_executor else java_here()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = memory_warnings(ranks, 1, warm=True, is_warm=lambda: False) if ranks else ()
    return Machine(
        host=host,
        python=sys.executable,
        java=java,
        java_path=java_path,
        versions=dict(versions()),
        driver=driver_version(),
        has_nvml=has_nvml(),
        gpus=tuple(gpu_names()),
        shared_memory=_space(SHARED_MEMORY),
        disks=_disks([*folders, tempfile.gettempdir()]),
        open_files=-1 if soft == resource.RLIM_INFINITY else soft,
        memory=tuple(" ".join(filter(None, (each.text, each.detail))) for each in needed),
        unresolved=_why_unresolved(host),
        interfaces=_missing_interfaces(),
    )


def _disks(folders: Iterable[str]) -> tuple[Space, ...]:
    """Return the space in each folder, without folders of the same file system."""
    by_device: dict[int, Space] = {}
    for folder in dict.fromkeys(folders):
        if (space := _space(folder)) is not None:
            by_device.setdefault(os.stat(folder).st_dev, space)
    return tuple(by_device.values())


def _space(folder: str) -> Space | None:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return Space(folder, usage.free, usage.total)


def _why_unresolved(host: str) -> str:
    try:
        resolve(host)
    except OSError as error:
        return str(error)
    return ""


def _missing_interfaces() -> dict[str, str]:
    """Return the variables that name no interface of this machine, with their values."""
    existing = [name for _, name in socket.if_nameindex()]
    missing = {}
    for variable in INTERFACE_VARIABLES:
        value = os.environ.get(variable, "")
        is_list = value[:1] not in ("", "^", "=")  # NCCL can also exclude, and match exactly
        # gloo takes names, and NCCL takes prefixes of names.
        accepts = str.startswith if variable.startswith("NCCL") else str.__eq__
        names = value.split(",")
        if is_list and not any(accepts(each, name) for each in existing for name in names):
            missing[variable] = value
    return missing


def versions() -> Mapping[str, str]:
    """Return the versions by name, without what is not installed."""
    from importlib import metadata  # slow to import

    found = {"Python": platform.python_version(), **_torch_versions()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    for name in NCCL_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.setdefault("NCCL", metadata.version(name))
    return found


def _torch_versions() -> dict[str, str]:
    """Read the versions of torch and of its CUDA from its files: importing it takes seconds."""
    from importlib import metadata

    spec = find_spec("torch")
    if spec is None:
        return {}
    text = ""
    with contextlib.suppress(OSError):
        text = Path(spec.origin or "").with_name("version.py").read_text()
    found = {}
    if version := re.search(r"^__version__ *= *['\"](.*)['\"]", text, re.MULTILINE):
        found["torch"] = version.group(1)
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["torch"] = metadata.version("torch")
    if cuda := re.search(r"^cuda\b.*= *['\"](.*)['\"]", text, re.MULTILINE):
        found["CUDA"] = cuda.group(1)
    return found


def checks_of(machine: Machine, needs: Needs, where: str = HERE) -> list[Check]:
    """Return the checks of a machine, which the report names so."""
    checks = (check for make in _CHECKS for check in make(machine, needs))
    return [replace(check, where=where) for check in checks]


def _java(machine: Machine, needs: Needs) -> Iterator[Check]:
    problem = problem_of(machine.java_path, machine.java, needs.min_java)
    if not problem:
        yield ok("Java", machine.java)
    elif needs.java:
        yield failure("Java", problem, how_to_install(needs.min_java))
    else:
        fix = f"{how_to_install(needs.min_java)} Only runs on a cluster need it."
        yield warning("Java", problem, fix)


def _python(machine: Machine, needs: Needs) -> Iterator[Check]:
    yield ok("Python", f"{machine.versions['Python']} at {machine.python}")


def _torch(machine: Machine, needs: Needs) -> Iterator[Check]:
    version = machine.versions.get("torch")
    if version is None:
        found = f"Python {machine.versions['Python']} at {machine.python} has no torch."
        fix = f"Install torch there. {SET_PYTHON}"
        yield (
            failure("torch", found, fix)
            if needs.has_ranks
            else not_checked("torch", "there is none, and the driver needs none")
        )
    elif release(version) < MIN_TORCH:
        fix = f"Install torch {'.'.join(map(str, MIN_TORCH))} or later."
        yield failure("torch", f"torch {version} is too old.", fix)
    else:
        yield ok("torch", version)


def _pandas(machine: Machine, needs: Needs) -> Iterator[Check]:
    spark, pandas = machine.versions.get("pyspark"), machine.versions.get("pandas")
    if spark and pandas and release(pandas) >= UNSUPPORTED_PANDAS:
        found = f"PySpark {spark} does not yet fully support pandas {pandas}."
        yield warning("pandas", found, "Install pandas 2: pip install 'pandas<3'.")


def _gpus(machine: Machine, needs: Needs) -> Iterator[Check]:
    """Yield the checks of GPUs; one of a machine without a driver, which needs nothing else."""
    driver = machine.driver
    if driver is None and not needs.gpus:
        yield ok("GPUs", "no GPU; none is wanted")
    elif driver is None:
        yield _no_driver(machine, needs)
    else:
        yield ok("NVIDIA driver", f"{driver.driver}, for CUDA up to {driver.cuda}")
        yield _number_of_gpus(machine, needs)
        yield from _cuda(machine, needs, driver)


def _no_driver(machine: Machine, needs: Needs) -> Check:
    wanted = f"{counted(needs.gpus, 'GPU')} wanted, and there is no GPU"
    if not machine.has_nvml:
        fix = "Install nvidia-ml-py, without which no GPU is found."
        return failure("GPUs", f"{wanted}: nvidia-ml-py is not installed.", fix)
    lacks, more = "no NVIDIA driver answers", ""
    if "torch" in machine.versions and "CUDA" not in machine.versions:
        lacks += f", and torch {machine.versions['torch']} is built without CUDA"
        more = " Then install a build of torch for CUDA."
    fix = Message(
        "Check the driver with nvidia-smi, and that the container may use the GPUs.{more} On a "
        "machine without GPUs, {run_on_cpus}.",
        more=more,
    )
    return failure("GPUs", f"{wanted}: {lacks}.", fix)


def _number_of_gpus(machine: Machine, needs: Needs) -> Check:
    if not needs.gpus:
        return ok("GPUs", f"{describe(machine.gpus)}; none is wanted")
    if len(machine.gpus) >= needs.gpus:
        return ok("GPUs", describe(machine.gpus))
    wanted = f"{counted(needs.gpus, 'GPU')} wanted, and there is {describe(machine.gpus)}."
    fix = "Check them with nvidia-smi, and that the container may use all of them."
    return failure("GPUs", wanted, fix)


def _cuda(machine: Machine, needs: Needs, driver: DriverVersion) -> Iterator[Check]:
    cuda = machine.versions.get("CUDA")
    if needs.gpus and "torch" in machine.versions and cuda is None:
        found = f"torch {machine.versions['torch']} is built without CUDA."
        fix = Message("Install a build of torch for CUDA, or {run_on_cpus}.")
        yield failure("CUDA", found, fix)
    elif cuda is None:
        yield not_checked("CUDA", "torch is missing or built without CUDA")
    elif release(driver.cuda)[0] < release(cuda)[0]:
        yield failure(
            "CUDA",
            f"torch is built for CUDA {cuda}, and the NVIDIA driver {driver.driver} supports "
            f"CUDA {driver.cuda}.",
            "Update the driver, or install a build of torch for an older CUDA.",
        )
    else:
        yield ok("CUDA", cuda)
    if cuda:
        nccl = machine.versions.get("NCCL")
        yield ok("NCCL", nccl) if nccl else not_checked("NCCL", "no package; torch may contain it")


def _shared_memory(machine: Machine, needs: Needs) -> Iterator[Check]:
    space = machine.shared_memory
    fix = (
        f"Enlarge {SHARED_MEMORY}: --shm-size for a container, an emptyDir in memory for a pod. "
        "Data loaders' workers and NCCL use it."
    )
    if space is None:
        yield failure("shared memory", f"There is no {SHARED_MEMORY}.", fix)
    else:
        limits = MIN_SHARED_MEMORY, ENOUGH_SHARED_MEMORY
        yield _space_check("shared memory", space, limits, fix)


def _disk(machine: Machine, needs: Needs) -> Iterator[Check]:
    fix = "Free space there, or set spark.local.dir or TMPDIR to a larger disk."
    for space in machine.disks:
        yield _space_check("disk", space, (MIN_DISK, ENOUGH_DISK), fix)


def _space_check(name: str, space: Space, limits: tuple[int, int], fix: str) -> Check:
    free, total = format_bytes(space.free), format_bytes(space.total)
    found = f"{free} of {total} free in {space.folder}"
    if space.free < limits[0]:
        return failure(name, f"Only {found}.", fix)
    if space.free < limits[1]:
        return warning(name, f"Only {found}.", fix)
    return ok(name, found)


def _open_files(machine: Machine, needs: Needs) -> Iterator[Check]:
    name, limit = "file descriptors", machine.open_files
    found = f"A process may open {limit} files (RLIMIT_NOFILE)."
    fix = (
        "Raise the limit where Spark's worker is started: ulimit -n 65536, LimitNOFILE= of a "
        "systemd unit, or --ulimit nofile= of a container."
    )
    if limit == -1:
        yield ok(name, "no limit")
    elif limit < MIN_OPEN_FILES:
        yield failure(name, found, fix)
    elif limit < ENOUGH_OPEN_FILES:
        yield warning(name, found, fix)
    else:
        yield ok(name, f"{limit} (RLIMIT_NOFILE)")


def _memory(machine: Machine, needs: Needs) -> Iterator[Check]:
    for text in machine.memory:
        fix = "Raise the limit, or start fewer ranks on this host."
        yield failure("memory", text[:1].upper() + text[1:], fix)
    if not machine.memory:
        yield ok("memory", "enough for Python and torch in the ranks")


def _host_name(machine: Machine, needs: Needs) -> Iterator[Check]:
    if machine.unresolved:
        yield (failure if needs.in_executor else warning)(
            "host name",
            f"'{machine.host}' cannot be resolved there: {machine.unresolved}.",
            "Add the name to DNS or to /etc/hosts, or set SPARK_LOCAL_HOSTNAME or SPARK_LOCAL_IP "
            "to a name or address that can be reached.",
        )
    else:
        yield ok("host name", machine.host)
    for variable, name in machine.interfaces.items():
        found = f"{variable}={name}, but there is no such network interface."
        yield failure("network interface", found, f"Unset {variable}, or correct it.")


_CHECKS: tuple[Callable[[Machine, Needs], Iterator[Check]], ...] = (
    _java,
    _python,
    _torch,
    _pandas,
    _gpus,
    _shared_memory,
    _disk,
    _open_files,
    _memory,
    _host_name,
)


def differences(machines: Sequence[Machine], driver: Machine) -> list[Check]:
    """Compare the versions of executors' machines with one another, and with the driver's."""
    checks = [
        *(_difference(name, machines) for name in (*MUST_BE_EQUAL, "pyarrow", "Java", "driver")),
        _difference("Python", [driver, *machines]),
        _other_torch(driver, machines),
    ]
    found = [check for check in checks if check is not None]
    return found or [
        ok(
            "versions",
            "the same on all executors",
            hosts_text(machine.host for machine in machines),
        )
    ]


def _version_of(machine: Machine, name: str) -> str:
    """Return the version that is compared; empty if the machine does not have it."""
    if name == "Java":
        return str(java_major(machine.java)) if machine.java else ""
    if name == "driver":
        return machine.driver.driver if machine.driver else ""
    version = machine.versions.get(name, "")
    return ".".join(version.split(".")[:2]) if name == "Python" else version


def _other_torch(driver: Machine, machines: Sequence[Machine]) -> Check | None:
    ours = driver.versions.get("torch")
    theirs = {m.versions["torch"] for m in machines if "torch" in m.versions}
    if ours is None or not theirs - {ours}:
        return None
    found = f"torch is {ours} on the driver, and {', '.join(sorted(theirs))} on executors."
    fix = "Install the same version: values with tensors may otherwise not load on the driver."
    return warning("versions", found, fix)


_LABELS = {"driver": "the NVIDIA driver"}


def _difference(name: str, machines: Sequence[Machine]) -> Check | None:
    """Return the check of a version that differs between machines that have it."""
    hosts: dict[str, list[str]] = {}
    for machine in machines:
        if version := _version_of(machine, name):
            hosts.setdefault(version, []).append(machine.host)
    if len(hosts) < 2:
        return None
    report = failure if name in (*MUST_BE_EQUAL, "Python") else warning
    found = "; ".join(f"{version} on {hosts_text(hosts[version])}" for version in sorted(hosts))
    return report(
        "versions",
        f"The hosts differ in {_LABELS.get(name, name)}: {found}.",
        Message(
            "Install the same version everywhere, or name one environment for all ({environment})."
        ),
        hosts_text(machine.host for machine in machines),
    )
