"""How this package reaches executors that lack it: as an archive, once per session."""

from __future__ import annotations

import functools
import hashlib
import io
import shutil
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cloudpickle

from distributor.errors import DistributorError
from distributor.launch.session import Session
from distributor.node.program import Program
from distributor.version import __version__
from distributor.wire import parcel
from distributor.wire.room import in_bytes


def portable_task(session: Session, spec: bytes) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Make the function that Spark runs in each task, and see to it that it can run there.

    Parameters
    ----------
    session : Session
        Where it will run.
    spec : bytes
        The pickled `TaskSpec`.

    Returns
    -------
    callable
        For ``mapInArrow``. It is pickled by value, for it must load where this package is not.
    """
    content = _archive()
    archive = f"distributor-{__version__}-{hashlib.sha256(content).hexdigest()[:12]}.zip"
    session.ship(archive, lambda path: path.write_bytes(content))
    return _bootstrap(spec, archive, __version__)


def _bootstrap(spec: bytes, archive: str, version: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    # No name of this module may be used inside: being local is what makes it travel by value.
    def task(batches: Iterator[Any]) -> Iterator[Any]:
        import sys

        try:
            from distributor.version import __version__ as found
        except ImportError:
            found = ""
        if found != version:
            from pyspark import SparkFiles

            for name in [name for name in sys.modules if name.split(".")[0] == "distributor"]:
                del sys.modules[name]
            sys.path.insert(0, SparkFiles.get(archive))
        from distributor.node.barrier_task import run

        yield from run(spec, batches)

    return task


def shipped_program(session: Session, program: Program) -> str:
    """Bring a large program to every executor, once, and name the file there that holds it."""
    pickled = io.BytesIO()
    pickler = parcel.Pickler(pickled)
    pickler.dump(program)
    digest = hashlib.sha256(pickled.getbuffer())
    for buffer in pickler.buffers:
        digest.update(buffer.raw())

    size = pickled.tell() + sum(buffer.raw().nbytes for buffer in pickler.buffers)

    def write(path: Path) -> None:
        _check_room(program.name, path.parent, size)
        with path.open("wb") as file:
            file.write(pickled.getbuffer())
            parcel.write_buffers(file, pickler.buffers)

    name = f"distributor-program-{digest.hexdigest()[:16]}"
    session.ship(name, write)
    return name


def _check_room(name: str, folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise DistributorError(
            f"'{name}' takes {in_bytes(size)} to the ranks, and the driver has {in_bytes(free)} "
            f"free in {folder}, from where Spark brings it to the executors. Make room there, name "
            "another folder (spark.local.dir), or let the ranks load the data themselves."
        )


@functools.cache
def _archive() -> bytes:
    """Pack this package, and what it needs there of the versions that the driver has."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in _modules():
            # With a fixed date, the same code is the same archive.
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _modules() -> Iterator[tuple[str, Path]]:
    for folder in (Path(__file__).parent.parent, Path(cloudpickle.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            yield str(path.relative_to(folder.parent)), path
    found = find_spec("threadpoolctl")  # not imported: that sets a variable of the user's process
    assert found is not None, "it is a requirement"
    assert found.origin is not None, "it is a file"
    yield "threadpoolctl.py", Path(found.origin)
