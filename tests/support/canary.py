"""Failures of a canary: a test that shows that undocumented API is still there and works."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from importlib import metadata

import pytest


@contextlib.contextmanager
def relies_on(package: str, what: str, user: str) -> Iterator[None]:
    """Fail with what an upgrade has changed, and what depends on it.

    Parameters
    ----------
    package : str
        The distribution's name, or "Python".
    what : str
        The undocumented API or behaviour.
    user : str
        The name in ``distributor._compat`` that relies on it.
    """
    try:
        yield
    except Exception as error:
        version = platform.python_version() if package == "Python" else metadata.version(package)
        pytest.fail(
            f"{package} {version} has changed {what}, on which distributor._compat.{user} relies: "
            f"{type(error).__name__}: {error}",
            pytrace=False,
        )
