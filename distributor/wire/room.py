"""What room there is on this host, for errors that come of a lack of it."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from pathlib import Path

SHARED_MEMORY = "/dev/shm"
CGROUPS = "/sys/fs/cgroup"
CONTAINERS = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
"""Where each version of cgroups tells of a container's memory: its bound, its use, and of what."""
_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_SIGNS = ("no space left on device", "shared memory", "bus error", "unable to mmap")


def lacks_room(error: BaseException) -> bool:
    """Tell whether an exception looks like one of a full disk or of exhausted shared memory."""
    if isinstance(error, OSError) and error.errno in _ERRORS:
        return True
    is_its_kind = isinstance(error, (OSError, RuntimeError))
    return is_its_kind and any(sign in str(error).lower() for sign in _SIGNS)


def told_room() -> str:
    """Say what is free where ranks and their loaders write, and what to do where it is little."""
    folders = [SHARED_MEMORY, tempfile.gettempdir(), os.getcwd()]
    usages = {f: shutil.disk_usage(f) for f in dict.fromkeys(folders) if os.path.isdir(f)}
    free = ", ".join(
        f"{in_bytes(usage.free)} of {in_bytes(usage.total)} in {folder}"
        for folder, usage in usages.items()
    )
    return (
        f"Free on this host: {free}. Data loaders' workers hand batches over in {SHARED_MEMORY}: "
        "give a container more of it (--shm-size, or an emptyDir in memory), or use fewer workers."
    )


def free_memory() -> int:
    """Tell how many bytes this process may still take of its host, or its container."""
    import psutil

    return min(psutil.virtual_memory().available, *map(_left_of, CONTAINERS))


def _left_of(files: tuple[str, str, str]) -> int:
    """Tell what a container's bound leaves; file caches make room when they must."""
    try:
        bound, used, stat = (Path(CGROUPS, file).read_text() for file in files)
        cached = dict(line.split() for line in stat.splitlines())["inactive_file"]
        return max(0, int(bound) - int(used) + int(cached))
    except (OSError, ValueError, KeyError):
        return sys.maxsize  # no such version of cgroups here, or no bound ("max")


def in_bytes(count: float) -> str:
    """Write a number of bytes for people."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
