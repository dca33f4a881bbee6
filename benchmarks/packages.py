"""Packages that may be missing: how they are imported, and the versions of all."""

from __future__ import annotations

import importlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

BASE = ("torch", "pyspark")


def library(name: str) -> Any:
    """Import a package that may be missing; untyped, so that types hold where it is."""
    return importlib.import_module(name)


def version_of(package: str) -> str | None:
    """Give a package's version; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions(package: str | None = None) -> dict[str, str]:
    """Give the versions that a measurement depends on.

    Parameters
    ----------
    package : str, optional
        The peer's own, beside those of every row.
    """
    wanted = [*BASE, *([package] if package else [])]
    found = {name: version_of(name) or "not installed" for name in wanted}
    return {"python": platform.python_version(), **found}


def machine() -> dict[str, Any]:
    """Describe the machine, as far as the figures depend on it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        "memory_gb": round(memory / 1e9),
    }
