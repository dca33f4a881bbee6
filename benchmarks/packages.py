"""Optional packages, and the versions of all packages."""

from __future__ import annotations

import importlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

BASE = ("torch", "pyspark")


def library(name: str) -> Any:
    """Import an optional package; untyped, so that type checks pass without it."""
    return importlib.import_module(name)


def version_of(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions(package: str | None = None) -> dict[str, str]:
    """Return the versions on which a measurement depends.

    Parameters
    ----------
    package : str, optional
        The package of a launcher, in addition to those of every row.
    """
    wanted = [*BASE, *([package] if package else [])]
    found = {name: version_of(name) or "not installed" for name in wanted}
    return {"python": platform.python_version(), **found}


def machine() -> dict[str, Any]:
    """Describe the properties of the machine that affect the figures."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        "memory_gb": round(memory / 1e9),
    }
