"""Packages that not every use needs, and what to install if one is missing."""

from __future__ import annotations

import sys
from importlib.util import find_spec

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


def _require(what: str, packages: tuple[str, ...], command: str) -> None:
    if missing := _missing(packages):
        listed = " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
        raise ModuleNotFoundError(
            f"{what} needs {listed}, which {sys.executable} does not have: {command}.",
            name=missing[0],
        )


def _missing(packages: tuple[str, ...]) -> list[str]:
    return [name for name in packages if find_spec(name) is None]
