"""Free disk, shared memory and memory on this host, for errors that a lack of them causes."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
SHARED_MEMORY = "/dev/shm"
CGROUPS = "/sys/fs/cgroup"
OWN_GROUPS = "/proc/self/cgroup"
# Of both versions of cgroups: the name of the controller and its folder, the files with the bound
# and the use of a group's memory, and in its statistics, the files that the kernel can drop.
_VERSIONS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
IN_YARN = "CONTAINER_ID"  # a variable of all processes in a container of YARN
NO_BOUND = 2**60  # bytes that version 1 has as the bound of a group without one, at least
_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_SIGNS = (
    "no space left on device",
    "shared memory",
    "bus error",
    "unable to mmap",
    "exited unexpectedly",  # a data loader's worker
)


def lacks_room(error: BaseException) -> bool:
    """Return whether an exception looks like a full disk or exhausted shared memory."""
    if isinstance(error, OSError) and error.errno in _ERRORS:
        return True
    is_its_kind = isinstance(error, (OSError, RuntimeError))
    return is_its_kind and any(sign in str(error).lower() for sign in _SIGNS)


def spark_local_dirs() -> list[str]:
    """Return Spark's folders for local files that the environment names; Python workers have it."""
    return list(filter(None, os.environ.get("SPARK_LOCAL_DIRS", "").split(",")))


def local_folder() -> str:
    """Return the folder for large temporary files: Spark's local folder with the most room."""
    # On YARN it belongs to the container, and on Kubernetes it is a volume; the temporary folder of
    # this machine, which is used without Spark, may be small there, or read-only.
    folders = list(filter(os.path.isdir, spark_local_dirs())) or [tempfile.gettempdir()]
    return max(folders, key=lambda folder: shutil.disk_usage(folder).free)


def describe_free_space() -> str:
    """Return the free space of the folders that ranks and loaders write to, and what to do."""
    folders = [SHARED_MEMORY, tempfile.gettempdir(), os.getcwd()]
    usages = {f: shutil.disk_usage(f) for f in dict.fromkeys(folders) if os.path.isdir(f)}
    free = ", ".join(
        f"{format_bytes(usage.free)} of {format_bytes(usage.total)} in {folder}"
        for folder, usage in usages.items()
    )
    return (
        f"Free on this host: {free}. Data loaders' workers hand batches over in {SHARED_MEMORY}: "
        "enlarge it (--shm-size, or an emptyDir in memory, for a container), or use fewer workers."
    )


class ContainerMemory(NamedTuple):
    """The memory that a limit leaves, and the limit (bytes)."""

    left: int
    most: int


def free_memory() -> int:
    """Return how many bytes this process can still allocate on its host or in its container."""
    try:
        found = memory_info()
        available = found.get("MemAvailable", found["MemFree"])
    except OSError:  # not Linux: what the host has
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    container = container_memory()
    return min(available, container.left) if container else available


def memory_info() -> dict[str, int]:
    """Return the figures of this host's memory in ``/proc``, in bytes."""
    lines = (line.partition(":") for line in (PROC / "meminfo").read_text().splitlines())
    return {name: 1024 * int(rest.split()[0]) for name, _, rest in lines}


def container_memory() -> ContainerMemory | None:
    """Return what the tightest bound of this process's cgroup and those above it leaves, if any."""
    bounds = (
        _bound_of(folder, *names)
        for controller, *names in _VERSIONS
        for folder in _groups(controller)
    )
    return min(filter(None, bounds), default=None)


def _groups(controller: str) -> Iterator[Path]:
    """List the folders of this process's group and those above it, up to the controller's."""
    own = base = Path(CGROUPS, controller)
    with contextlib.suppress(OSError):
        for line in Path(OWN_GROUPS).read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                own = base / path.lstrip("/")
    # In a container the path may be the host's, of which nothing but the base is there.
    yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(base))


def _bound_of(folder: Path, bound: str, use: str, cached: str) -> ContainerMemory | None:
    try:
        most, used = (int((folder / file).read_text()) for file in (bound, use))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        free = most - used + int(stat.get(cached, 0))
    except (OSError, ValueError):
        return None  # there is no such group or version here, or no bound ("max")
    return ContainerMemory(max(0, free), most) if most < NO_BOUND else None


def format_bytes(count: float) -> str:
    """Return a number of bytes as text, such as "1.5 GB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
