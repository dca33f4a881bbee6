"""Sends this package to the executors, once per session."""

from __future__ import annotations

import functools
import hashlib
import io
import pickle
import zipfile
from collections.abc import Callable, Iterator
from importlib.abc import ResourceLoader
from importlib.util import find_spec
from typing import Any, NamedTuple

from distributor import source
from distributor.screen.one_time_warnings import warn_if_source_changed
from distributor.spark.executor_files import send_file
from distributor.spark.session import Session


def portable_task(
    session: Session, function: str, argument: bytes
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return the function that Spark runs in each task, and send the source that it needs."""
    own = _own_source()
    archive = f"{source.ARCHIVE}{hashlib.sha256(own.archive).hexdigest()[:16]}.zip"
    send_file(session, archive, lambda path: path.write_bytes(own.archive))
    return _bootstrap(function, argument, archive, own.digest, own.importing)


def task_frame(
    session: Session,
    rows: Any,
    function: str,
    spec: object,
    schema: str,
    profile: Any,
    *,
    barrier: bool,
) -> Any:
    """Plan a job whose tasks run a function of this package; nothing is submitted yet."""
    task = portable_task(session, function, pickle.dumps(spec, protocol=5))
    options = {} if profile is None else {"profile": profile}
    return session.map_in_arrow(rows, task, schema, barrier=barrier, **options)


def _bootstrap(
    function: str, argument: bytes, archive: str, digest: str, importing: bytes
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    # No name of this module may be used inside: being local is what makes it travel by value.
    def task(batches: Iterator[Any]) -> Iterator[Any]:
        import pkgutil
        import sys
        import types

        from pyspark import SparkFiles

        module: Any = sys.modules.get("distributor.source")
        if getattr(getattr(module, "checked", None), "digest", None) != digest:
            module = types.ModuleType("distributor.source")
            exec(compile(importing, "distributor/source.py", "exec"), vars(module))
        replaced = module.import_drivers_source(digest, lambda: SparkFiles.get(archive))
        yield from pkgutil.resolve_name(function)(argument, batches, replaced)

    return task


class _Own(NamedTuple):
    """The source of this package that the driver runs, and what executors need to import it."""

    digest: str
    importing: bytes
    archive: bytes


@functools.cache
def _own_source() -> _Own:
    """Pack this package with the packages that it needs, in the driver's versions.

    This is done once in a process: if the files change later, the process still runs what it has
    imported.
    """
    warn_if_source_changed()
    ours = source.files_of(source.own_spec())
    files = {f"distributor/{name}": content for name, content in ours.items()}
    for name, content in source.files_of(find_spec("cloudpickle")).items():
        files[f"cloudpickle/{name}"] = content
    found = find_spec("threadpoolctl")  # not imported: that sets a variable of the user's process
    assert found is not None, "it is a requirement"
    assert isinstance(found.loader, ResourceLoader), "it is a file, or in an archive"
    assert found.origin is not None, "it is a file, or in an archive"
    files["threadpoolctl.py"] = found.loader.get_data(found.origin)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            # With a fixed date, the same code is the same archive.
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return _Own(source.digest_of(ours), ours["source.py"], buffer.getvalue())
