"""Files and folders that other users of the machine can neither read nor prepare."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path


def private_folder(path: Path) -> Path:
    """Create a folder for this user alone, or use one that this user has created.

    Other users can create the same path in a temporary folder first. The parent must exist.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not is_private_folder(path):
        raise PermissionError(f"'{path}' is not a folder that only this user can write to")
    return path


def is_private_folder(path: Path) -> bool:
    """Return whether a path is a folder of this user, no link, that no others may write to."""
    try:
        found = path.lstat()
    except OSError:
        return False
    others_may_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not others_may_write


def for_this_user(path: str, flags: int) -> int:
    """Open a file that only this user can read, if it is created: an ``opener`` for `open`."""
    return os.open(path, flags, 0o600)
