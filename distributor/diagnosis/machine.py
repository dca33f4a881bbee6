"""What a machine has, on the driver and on executors alike, and what is wrong with it.

Nothing heavy is imported: versions are read from files.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distributor.core.gpus import DriverVersion, describe, driver_version, gpu_names, has_nvml
from distributor.core.resources import SHARED_MEMORY, format_bytes, spark_local_dirs
from distributor.core.spelling import Message
from distributor.core.text import counted
from distributor.core.versions import SET_PYTHON, release
from distributor.diagnosis.report import HERE, Check, failure, hosts_text, not_checked, ok, warning

MIB, GIB = 2**20, 2**30
MIN_SHARED_MEMORY, ENOUGH_SHARED_MEMORY = 48 * MIB, 512 * MIB
"""Free bytes below which a check fails, and below which it warns. Docker's default is 64 MiB."""
MIN_DISK, ENOUGH_DISK = 256 * MIB, 2 * GIB


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
    versions: Mapping[str, str]
    driver: DriverVersion | None
    has_nvml: bool
    gpus: tuple[str, ...]
    shared_memory: Space | None
    disks: tuple[Space, ...]


def examine(host: str) -> Machine:
    """Collect what this machine has."""
    return Machine(
        host=host,
        python=sys.executable,
        versions={"Python": platform.python_version(), **_torch_versions()},
        driver=driver_version(),
        has_nvml=has_nvml(),
        gpus=tuple(gpu_names()),
        shared_memory=_space(SHARED_MEMORY),
        disks=_disks(),
    )


def _disks() -> tuple[Space, ...]:
    """Return the space in each folder for files, without folders of the same file system."""
    by_device: dict[int, Space] = {}
    for folder in (os.getcwd(), *spark_local_dirs(), tempfile.gettempdir()):
        if (space := _space(folder)) is not None:
            by_device.setdefault(os.stat(folder).st_dev, space)
    return tuple(by_device.values())


def _space(folder: str) -> Space | None:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return Space(folder, usage.free, usage.total)


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


def machine_checks(machine: Machine, gpus: int, where: str = HERE) -> list[Check]:
    """Return the checks of a machine whose ranks need so many GPUs."""
    checks = [
        ok("Python", f"{machine.versions['Python']} at {machine.python}"),
        _torch(machine),
        *_gpus(machine, gpus),
        _shared_memory(machine),
        *_disk(machine),
    ]
    return [replace(check, where=where) for check in checks]


def _torch(machine: Machine) -> Check:
    if version := machine.versions.get("torch"):
        return ok("torch", version)
    found = f"Python {machine.versions['Python']} at {machine.python} has no torch."
    return failure("torch", found, f"Install torch there. {SET_PYTHON}")


def _gpus(machine: Machine, wanted: int) -> Iterator[Check]:
    """Yield the checks of GPUs; one for ranks on CPUs, which need nothing else."""
    if not wanted:
        yield ok("GPUs", f"{describe(machine.gpus)}; none is wanted")
    elif machine.driver is None:
        yield _no_driver(machine, wanted)
    else:
        yield _number_of_gpus(machine, wanted)
        yield _cuda(machine, machine.driver)


def _no_driver(machine: Machine, wanted: int) -> Check:
    lack = f"{counted(wanted, 'GPU')} wanted, and there is no GPU"
    if not machine.has_nvml:
        fix = "Install nvidia-ml-py, without which no GPU is found."
        return failure("GPUs", f"{lack}: nvidia-ml-py is not installed.", fix)
    lack, more = f"{lack}: no NVIDIA driver answers", ""
    if "torch" in machine.versions and "CUDA" not in machine.versions:
        lack += f", and torch {machine.versions['torch']} is built without CUDA"
        more = " Then install a build of torch for CUDA."
    fix = Message(
        "Check the driver with nvidia-smi, and that the container may use the GPUs.{more} On a "
        "machine without GPUs, {run_on_cpus}.",
        more=more,
    )
    return failure("GPUs", f"{lack}.", fix)


def _number_of_gpus(machine: Machine, wanted: int) -> Check:
    if len(machine.gpus) >= wanted:
        return ok("GPUs", describe(machine.gpus))
    found = f"{counted(wanted, 'GPU')} wanted, and there is {describe(machine.gpus)}."
    fix = "Check them with nvidia-smi, and that the container may use all of them."
    return failure("GPUs", found, fix)


def _cuda(machine: Machine, driver: DriverVersion) -> Check:
    cuda = machine.versions.get("CUDA")
    if cuda is None:
        found = f"torch {machine.versions.get('torch', '')} is built without CUDA."
        return failure(
            "CUDA", found, Message("Install a build of torch for CUDA, or {run_on_cpus}.")
        )
    if release(driver.cuda)[0] < release(cuda)[0]:
        return failure(
            "CUDA",
            f"torch is built for CUDA {cuda}, and the NVIDIA driver {driver.driver} supports "
            f"CUDA {driver.cuda}.",
            "Update the driver, or install a build of torch for an older CUDA.",
        )
    return ok("CUDA", f"{cuda}, with the NVIDIA driver {driver.driver}")


def _shared_memory(machine: Machine) -> Check:
    space = machine.shared_memory
    fix = (
        f"Enlarge {SHARED_MEMORY}: --shm-size for a container, an emptyDir in memory for a pod. "
        "Data loaders' workers and NCCL use it."
    )
    if space is None:
        return failure("shared memory", f"There is no {SHARED_MEMORY}.", fix)
    return _space_check("shared memory", space, (MIN_SHARED_MEMORY, ENOUGH_SHARED_MEMORY), fix)


def _disk(machine: Machine) -> Iterator[Check]:
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


def version_check(machines: Sequence[Machine], driver: Machine) -> Check:
    """Compare the versions of executors, which a run has found to be alike, with the driver's."""
    where = hosts_text(machine.host for machine in machines)
    ours = driver.versions.get("torch")
    theirs = {machine.versions.get("torch") for machine in machines}
    if ours is None or theirs == {ours}:
        return ok("versions", "the same on all executors", where)
    others = ", ".join(sorted(filter(None, theirs)))
    return warning(
        "versions",
        f"torch is {ours} on the driver, and {others} on executors.",
        "Install the same version: values with tensors may otherwise not load on the driver.",
        where,
    )


STORAGE = "storage"
"""The name of the check."""
FIX = (
    "Use storage that every host reaches at the same path or address, such as NFS mounted on all "
    "hosts or an object store, and that the user of Spark's executors may write to."
)
_CONTENT = b"written by distributor.doctor"


@contextlib.contextmanager
def shared_marker(path: str | None) -> Iterator[tuple[str, Check]]:
    """Write a file to storage for the executors to find, and remove it at the end."""
    marker = f".distributor-doctor-{uuid.uuid4().hex}"
    if path is None:
        yield marker, not_checked(STORAGE, "no storage path was named")
        return
    try:
        filesystem, folder = _open(path)
        _write(filesystem, f"{folder}/{marker}")
    except Exception as error:  # of pyarrow, fsspec or an object store's client
        yield marker, failure(STORAGE, f"{path}: {_text(error)}", FIX)
        return
    try:
        yield marker, ok(STORAGE, f"{path} can be written")
    finally:
        with contextlib.suppress(Exception):  # as above
            filesystem.delete_file(f"{folder}/{marker}")


def check_storage(path: str, marker: str, where: str) -> Check:
    """Check, on an executor, that storage has the driver's file and can be written to."""
    own = f"{marker}-{uuid.uuid4().hex}"
    try:
        filesystem, folder = _open(path)
        if filesystem.get_file_info(f"{folder}/{marker}").type.name != "File":
            found = f"{path} is not the driver's: a file that the driver wrote is missing there."
            return failure(STORAGE, found, FIX, where)
        _write(filesystem, f"{folder}/{own}")
        filesystem.delete_file(f"{folder}/{own}")
    except Exception as error:  # as above
        return failure(STORAGE, f"{path}: {_text(error)}", FIX, where)
    return ok(STORAGE, f"{path} has the driver's file and can be written", where)


def _open(path: str) -> tuple[Any, str]:
    from distributor.filesystems import is_local, resolve

    filesystem, folder = resolve(path)
    if is_local(filesystem) and not os.path.isdir(folder):
        raise FileNotFoundError("there is no such folder")
    return filesystem, folder


def _write(filesystem: Any, path: str) -> None:
    with filesystem.open_output_stream(path) as stream:
        stream.write(_CONTENT)


def _text(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
