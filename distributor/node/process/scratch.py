"""The temporary folder of a rank's multiprocessing, which is removed even if the rank is killed."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile

from distributor._compat.cpython import set_multiprocessing_folder


def new_scratch_path() -> str:
    """Return a new path, as short as multiprocessing's own: socket paths have a length limit."""
    return os.path.join(tempfile.gettempdir(), f"pymp-{secrets.token_hex(4)}")


def create_scratch(folder: str) -> None:
    """Create the folder, and have this process and its children put their sockets there."""
    try:
        os.mkdir(folder, 0o700)
    except OSError:
        return  # multiprocessing then makes its own when it needs one, and reports if it cannot
    set_multiprocessing_folder(folder)


def remove_scratch(folder: str) -> None:
    """Remove the folder; another process may do so at the same time."""
    shutil.rmtree(folder, ignore_errors=True)
