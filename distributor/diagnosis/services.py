"""What the hosts of a run share: storage, and MLflow's server."""

from __future__ import annotations

import contextlib
import os
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

from distributor.diagnosis.report import HERE, Check, failure, not_checked, ok, warning

SERVICES = ("storage", "MLflow")
"""The names of these checks."""
SERVER_SECONDS = 3.0
"""Seconds for MLflow's server to answer."""
SERVER_ERROR, UNAUTHORIZED = 500, (401, 403)
STORAGE_FIX = (
    "Use storage that every host reaches at the same path or address, such as NFS mounted on all "
    "hosts or an object store, and that the user of Spark's executors may write to."
)
_CONTENT = b"written by distributor.doctor"


def tracking_uri() -> str:
    """Return the address of MLflow's server that a run would use; empty if none is configured."""
    if "mlflow" in sys.modules:
        return str(sys.modules["mlflow"].get_tracking_uri())
    return os.environ.get("MLFLOW_TRACKING_URI", "")


def check_tracking(uri: str, where: str = HERE) -> Check:
    """Check that MLflow's server answers."""
    name = "MLflow"
    if not uri.startswith(("http://", "https://")):
        why = f"{uri!r} is no server's address" if uri else "MLFLOW_TRACKING_URI is not set"
        return not_checked(name, why, where)
    try:
        urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=SERVER_SECONDS).close()
    except urllib.error.HTTPError as error:
        if error.code in UNAUTHORIZED:
            fix = "Set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and _PASSWORD."
            return warning(name, f"{uri} answers, but refuses access: {error}.", fix, where)
        if error.code >= SERVER_ERROR:
            return failure(name, f"{uri} answers: {error}.", "See the server's log.", where)
    except (OSError, ValueError) as error:
        fix = (
            "Start the server, or set MLFLOW_TRACKING_URI to an address that the driver and all "
            "executors reach; runs are otherwise not recorded."
        )
        return failure(name, f"{uri} does not answer: {error}.", fix, where)
    return ok(name, f"{uri} answers", where)


@contextlib.contextmanager
def shared_marker(path: str | None) -> Iterator[tuple[str, list[Check]]]:
    """Write a file to storage for the executors to find, and remove it at the end."""
    marker = f".distributor-doctor-{uuid.uuid4().hex}"
    if path is None:
        yield marker, [not_checked("storage", "no storage path was named")]
        return
    try:
        filesystem, folder = _open(path)
        _write(filesystem, f"{folder}/{marker}")
    except Exception as error:  # of pyarrow, fsspec or an object store's client
        yield marker, [failure("storage", f"{path}: {_text(error)}", STORAGE_FIX)]
        return
    try:
        yield marker, [ok("storage", f"{path} can be written")]
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
            return failure("storage", found, STORAGE_FIX, where)
        _write(filesystem, f"{folder}/{own}")
        filesystem.delete_file(f"{folder}/{own}")
    except Exception as error:  # as above
        return failure("storage", f"{path}: {_text(error)}", STORAGE_FIX, where)
    return ok("storage", f"{path} has the driver's file and can be written", where)


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
