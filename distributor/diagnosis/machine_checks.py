"""What is wrong with one machine, whether it is the driver's or an executor's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from distributor.core.gpus import describe
from distributor.core.resources import SHARED_MEMORY, format_bytes
from distributor.core.text import counted
from distributor.core.versions import SET_PYTHON, release
from distributor.diagnosis.installed import java_major
from distributor.diagnosis.machine import Machine, Space
from distributor.diagnosis.report import HERE, Check, failure, not_checked, ok, warning

MIB, GIB = 2**20, 2**30
MIN_SHARED_MEMORY, ENOUGH_SHARED_MEMORY = 48 * MIB, 512 * MIB
"""Free bytes below which a check fails, and below which it warns. Docker's default is 64 MiB."""
MIN_DISK, ENOUGH_DISK = 256 * MIB, 2 * GIB
MIN_OPEN_FILES, ENOUGH_OPEN_FILES = 256, 1024
MIN_TORCH = (2, 4)


@dataclass(frozen=True)
class Needs:
    """What a machine needs.

    Parameters
    ----------
    gpus : int
        The number of GPUs.
    has_ranks : bool
        Whether ranks run there.
    java : bool
        Whether Spark is started there.
    min_java : int
        The oldest Java that works.
    """

    gpus: int = 0
    has_ranks: bool = True
    java: bool = False
    min_java: int = 0


def checks_of(machine: Machine, needs: Needs, where: str) -> list[Check]:
    """Return the checks of a machine.

    Parameters
    ----------
    machine : Machine
        What it has.
    needs : Needs
        What it needs.
    where : str
        How the report names it.
    """
    return [check for make in _CHECKS for check in make(machine, needs, where)]


def _java(machine: Machine, needs: Needs, where: str) -> Iterator[Check]:
    fix = (
        f"Install Java {needs.min_java} or later, and set JAVA_HOME to it or put its java on PATH."
    )
    report = failure if needs.java else warning
    if not needs.java:
        fix += " Only --cluster (local_mode=False) needs it."
    if not machine.java_path:
        yield report("Java", "There is no Java: JAVA_HOME is unset, and PATH has none.", fix, where)
    elif not machine.java:
        found = f"{machine.java_path} does not run, or reports no version."
        yield report("Java", found, fix, where)
    elif java_major(machine.java) < needs.min_java:
        found = f"Java {machine.java} at {machine.java_path} is too old for Spark."
        yield report("Java", found, fix, where)
    else:
        yield ok("Java", machine.java, where)


def _python(machine: Machine, needs: Needs, where: str) -> Iterator[Check]:
    yield ok("Python", f"{machine.versions['Python']} at {machine.python}", where)


def _torch(machine: Machine, needs: Needs, where: str) -> Iterator[Check]:
    version = machine.versions.get("torch")
    if version is None:
        found = f"Python {machine.versions['Python']} at {machine.python} has no torch."
        fix = f"Install torch there. {SET_PYTHON}"
        yield (
            failure("torch", found, fix, where)
            if needs.has_ranks
            else not_checked("torch", "there is none, and the driver needs none", where)
        )
    elif release(version) < MIN_TORCH:
        fix = f"Install torch {'.'.join(map(str, MIN_TORCH))} or later."
        yield failure("torch", f"torch {version} is too old.", fix, where)
    else:
        yield ok("torch", version, where)


def _cuda(machine: Machine, needs: Needs, where: str) -> Iterator[Check]:
    cuda, driver = machine.versions.get("CUDA"), machine.driver
    if needs.gpus and "torch" in machine.versions and cuda is None:
        found = f"torch {machine.versions['torch']} is built without CUDA."
        yield failure("CUDA", found, "Install a build of torch for CUDA, or use CPUs.", where)
    elif cuda is None:
        yield not_checked("CUDA", "torch is missing or built without CUDA", where)
    elif driver and release(driver.cuda)[0] < release(cuda)[0]:
        yield failure(
            "CUDA",
            f"torch is built for CUDA {cuda}, and the NVIDIA driver {driver.driver} supports "
            f"CUDA {driver.cuda}.",
            "Update the driver, or install a build of torch for an older CUDA.",
            where,
        )
    else:
        yield ok("CUDA", cuda, where)
    nccl = machine.versions.get("NCCL")
    yield ok("NCCL", nccl, where) if nccl else not_checked("NCCL", "it is not installed", where)


def _gpus(machine: Machine, needs: Needs, where: str) -> Iterator[Check]:
    driver = machine.driver
    if driver:
        yield ok("NVIDIA driver", f"{driver.driver}, for CUDA up to {driver.cuda}", where)
    else:
        yield not_checked("NVIDIA driver", "there is none", where)
    if not needs.gpus:
        yield ok("GPUs", f"{describe(machine.gpus)}; none is wanted", where)
    elif len(machine.gpus) < needs.gpus:
        fix = "Check the driver with nvidia-smi, and that the container may use the GPUs."
        wanted = f"{counted(needs.gpus, 'GPU')} wanted, and there is {describe(machine.gpus)}."
        yield failure("GPUs", wanted, fix, where)
    else:
        yield ok("GPUs", describe(machine.gpus), where)


def _shared_memory(machine: Machine, needs: Needs, where: str) -> Iterator[Check]:
    space = machine.shared_memory
    fix = (
        f"Enlarge {SHARED_MEMORY}: --shm-size for a container, an emptyDir in memory for a pod. "
        "Data loaders' workers and NCCL use it."
    )
    if space is None:
        yield failure("shared memory", f"There is no {SHARED_MEMORY}.", fix, where)
    else:
        limits = MIN_SHARED_MEMORY, ENOUGH_SHARED_MEMORY
        yield _space("shared memory", space, limits, fix, where)


def _disk(machine: Machine, needs: Needs, where: str) -> Iterator[Check]:
    fix = "Free space there, or set spark.local.dir or TMPDIR to a larger disk."
    for space in machine.disks:
        yield _space("disk", space, (MIN_DISK, ENOUGH_DISK), fix, where)


def _space(name: str, space: Space, limits: tuple[int, int], fix: str, where: str) -> Check:
    free, total = format_bytes(space.free), format_bytes(space.total)
    found = f"{free} of {total} free in {space.folder}"
    if space.free < limits[0]:
        return failure(name, f"Only {found}.", fix, where)
    if space.free < limits[1]:
        return warning(name, f"Only {found}.", fix, where)
    return ok(name, found, where)


def _open_files(machine: Machine, needs: Needs, where: str) -> Iterator[Check]:
    name, limit = "file descriptors", machine.open_files
    found = f"A process may open {limit} files (RLIMIT_NOFILE)."
    fix = (
        "Raise the limit where Spark's worker is started: ulimit -n 65536, LimitNOFILE= of a "
        "systemd unit, or --ulimit nofile= of a container."
    )
    if limit == -1:
        yield ok(name, "no limit", where)
    elif limit < MIN_OPEN_FILES:
        yield failure(name, found, fix, where)
    elif limit < ENOUGH_OPEN_FILES:
        yield warning(name, found, fix, where)
    else:
        yield ok(name, f"{limit} (RLIMIT_NOFILE)", where)


def _memory(machine: Machine, needs: Needs, where: str) -> Iterator[Check]:
    for text in machine.memory:
        fix = "Raise the limit, or start fewer ranks on this host."
        yield failure("memory", text[:1].upper() + text[1:], fix, where)
    if not machine.memory:
        yield ok("memory", "enough for Python and torch in the ranks", where)


def _host_name(machine: Machine, needs: Needs, where: str) -> Iterator[Check]:
    if machine.unresolved:
        yield (warning if where == HERE else failure)(
            "host name",
            f"'{machine.host}' cannot be resolved there: {machine.unresolved}.",
            "Add the name to DNS or to /etc/hosts, or set SPARK_LOCAL_HOSTNAME or SPARK_LOCAL_IP "
            "to a name or address that can be reached.",
            where,
        )
    else:
        yield ok("host name", machine.host, where)
    for variable, name in machine.interfaces.items():
        found = f"{variable}={name}, but there is no such network interface."
        yield failure("network interface", found, f"Unset {variable}, or correct it.", where)


_CHECKS: tuple[Callable[[Machine, Needs, str], Iterator[Check]], ...] = (
    _java,
    _python,
    _torch,
    _cuda,
    _gpus,
    _shared_memory,
    _disk,
    _open_files,
    _memory,
    _host_name,
)
