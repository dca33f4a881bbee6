"""Names of other packages that have no equivalent here, refused with what to use instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

RAY_METRICS: Mapping[str, str] = {
    "RayMetricsMonitor": "The CPU, memory, network and GPU use of each node is recorded in the "
    "job's MLflow run without it.",
}
"""Names that belong to ``ray_launch`` of ``serverless_gpu``."""


def refusing(module: str, names: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """Return a module's ``__getattr__`` that says what to use instead of each of these names."""

    def refuse(name: str) -> Any:
        if instead := names.get(name):
            raise NotImplementedError(f"{module}.{name} is not supported. {instead}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return refuse
