"""The temporary folder of a rank's multiprocessing, removed if the rank is killed."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile

from distributor._compat.cpython import set_multiprocessing_folder


def new_scratch_path() -> str:
    """Name a folder; as short as multiprocessing's own, for the paths of sockets have a limit."""
    return os.path.join(tempfile.gettempdir(), f"pymp-{secrets.token_hex(4)}")


def create_scratch(folder: str) -> None:
    """Make it, and have this process and its children put their sockets there."""
    try:
        os.mkdir(folder, 0o700)
    except OSError:
        return  # multiprocessing then makes its own when it needs one, and says why it cannot
    set_multiprocessing_folder(folder)


def remove_scratch(folder: str) -> None:
    """Remove it, whoever else does so at the same time."""
    shutil.rmtree(folder, ignore_errors=True)
