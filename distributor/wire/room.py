"""What room there is on this host, for errors that come of a lack of it."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile

SHARED_MEMORY = "/dev/shm"
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


def in_bytes(count: float) -> str:
    """Write a number of bytes for people."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
