"""The facts about a job that its MLflow run records as tags."""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Mapping

from distributor.version import __version__


def describe_job(run_id: str, launch: Mapping[str, object]) -> dict[str, object]:
    """Return the facts about a job that its MLflow run records as tags.

    Parameters
    ----------
    run_id : str
        The id of the job's run (of this package, and not of MLflow).
    launch : mapping of str to object
        What its launcher says of itself.
    """
    named = {f"version.{package}": number for package, number in _versions().items()}
    return {"run_id": run_id, "attempt": 0, **launch, **named}


@functools.cache  # importlib.metadata remembers each state of the folders that it has searched
def _versions() -> Mapping[str, str]:
    from importlib import metadata  # slow to import

    versions = {"distributor": __version__, "python": platform.python_version()}
    for package in ("torch", "pyspark"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
