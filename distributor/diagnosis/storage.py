"""Whether all hosts of a run share its storage."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from typing import Any

from distributor.diagnosis.report import Check, failure, not_checked, ok

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
