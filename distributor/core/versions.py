"""The versions that a node runs its ranks with, and whether all nodes have the same."""

from __future__ import annotations

import functools
import platform
import re
import sys
from collections.abc import Collection, Mapping
from importlib.util import find_spec

import cloudpickle

from distributor.core.addresses import host_name
from distributor.errors import ExecutorNotReady

# What every run compares; of an environment that nodes have installed, all.
SHARED = ("Python", "torch", "cloudpickle")
SET_PYTHON = (
    "Set PYSPARK_PYTHON (or spark.pyspark.python for spark-submit and distributor run) to an "
    "interpreter that has it, before the Spark session is made."
)
INSTALL = (
    "Install the same version everywhere, or name an interpreter that has it, or one environment "
    f"for all (environment=). {SET_PYTHON}"
)
MOST_HOSTS = 3  # hosts that an error names for each version

Software = Mapping[str, str]  # versions by name


def release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def check_interpreter() -> None:
    if find_spec("torch") is None:
        raise ExecutorNotReady(
            f"The executor on {host_name()} runs Python {platform.python_version()} at "
            f"{sys.executable}, which has no torch. Install torch there. {SET_PYTHON}"
        )


def pickling_software() -> Software:
    """Return the versions that must be equal on the driver and the nodes."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, "cloudpickle": cloudpickle.__version__}


@functools.cache
def software() -> Software:
    """Return the versions that must be equal on all nodes."""
    from importlib import metadata  # slow to import, and not needed on the driver

    try:
        torch = {"torch": metadata.version("torch")}
    except metadata.PackageNotFoundError:
        torch = {}  # a build that was never installed
    return {**pickling_software(), **torch}


def check_alike(found: Mapping[str, Software]) -> None:
    """Check that several hosts have the same versions."""
    others = {name for versions in found.values() for name in versions}.difference(SHARED)
    for name in (*SHARED, *sorted(others)):
        hosts: dict[str, list[str]] = {}
        for host, versions in found.items():
            if name in versions:
                hosts.setdefault(versions[name], []).append(host)
        if len(hosts) > 1:
            versions_found = "; ".join(
                f"{version} on {listed(hosts[version])}" for version in sorted(hosts)
            )
            remedy = INSTALL if name in SHARED else f"Name one in environment=: '{name}==...'."
            raise ExecutorNotReady(
                f"The nodes of this run differ in {name}: {versions_found}. {remedy}"
            )


def listed(hosts: Collection[str]) -> str:
    """Return the first hosts as text, with the number of the others."""
    named = ", ".join(sorted(hosts)[:MOST_HOSTS])
    more = len(hosts) - MOST_HOSTS
    return f"{named} and {more} more" if more > 0 else named


DISTRIBUTION = "torch-spark-distributor"  # the name under which pip knows this package


def install_command(extra: str) -> str:
    """Return the command that installs this package with an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def require_spark() -> None:
    """Raise ModuleNotFoundError if a driver of Spark would lack a package."""
    packages = "pyspark", "pyarrow", "pandas"
    # A PySpark that is there may be a platform's own, which the extra would replace.
    has_pyspark = find_spec("pyspark") is not None
    command = f"pip install {' '.join(_missing(packages))}"
    _require("A Spark cluster", packages, command if has_pyspark else install_command("spark"))


def require_arrow(what: str) -> None:
    """Raise ModuleNotFoundError if checkpoints or Parquet files could not be read."""
    _require(what, ("pyarrow", "numpy"), install_command("train"))


def require_optuna(what: str) -> None:
    """Raise ModuleNotFoundError if studies could not be made."""
    _require(what, ("optuna",), install_command("tune"))


def require_jinja(what: str) -> None:
    """Raise ModuleNotFoundError if no page could be made; torch requires jinja2."""
    _require(what, ("jinja2",), "pip install jinja2")


def _require(what: str, packages: tuple[str, ...], command: str) -> None:
    if missing := _missing(packages):
        listed = " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
        raise ModuleNotFoundError(
            f"{what} needs {listed}, which {sys.executable} does not have: {command}.",
            name=missing[0],
        )


def _missing(packages: tuple[str, ...]) -> list[str]:
    return [name for name in packages if find_spec(name) is None]
