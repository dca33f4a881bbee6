"""The temporary folders of a rank, which are removed even if the rank is killed."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile

from distributor._compat.cpython import set_multiprocessing_folder

ELSEWHERE = "elsewhere"  # a link in the scratch folder to a second folder


def new_scratch_path() -> str:
    """Return a new path, as short as multiprocessing's own: socket paths have a length limit."""
    return os.path.join(tempfile.gettempdir(), f"pymp-{secrets.token_hex(4)}")


def create_scratch(folder: str) -> None:
    """Create the folder, and have this process and its children put their sockets there."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        raise  # another user has created it, who could read the path on a command line
    except OSError:
        return  # multiprocessing then makes its own when it needs one, and reports if it cannot
    set_multiprocessing_folder(folder)


def create_elsewhere(scratch: str, parent: str) -> str:
    """Create a folder elsewhere that is removed together with a scratch folder, at most one."""
    folder = os.path.join(parent, os.path.basename(scratch))
    os.symlink(folder, os.path.join(scratch, ELSEWHERE))
    os.makedirs(parent, exist_ok=True)
    os.mkdir(folder, 0o700)
    return folder


def remove_scratch(folder: str) -> None:
    """Remove the folder, and the one elsewhere; another process may do so at the same time."""
    with contextlib.suppress(OSError):
        elsewhere = os.readlink(os.path.join(folder, ELSEWHERE))
        # The rank's program can write here too, and must not choose what is removed.
        if os.path.basename(elsewhere) == os.path.basename(folder):
            shutil.rmtree(elsewhere, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
