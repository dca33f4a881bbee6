"""How this package reaches executors that lack it: as an archive, once per session."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle

from distributor.launch.session import Session
from distributor.version import __version__


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


def _archive() -> bytes:
    """Pack this package and cloudpickle, whose versions must agree with the driver's."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for folder in (Path(__file__).parent.parent, Path(cloudpickle.__file__).parent):
            for path in sorted(folder.rglob("*.py")):
                # With a fixed date, the same code is the same archive.
                entry = zipfile.ZipInfo(str(path.relative_to(folder.parent)))
                archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
