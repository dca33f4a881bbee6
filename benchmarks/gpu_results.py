"""The file of what ran on a GPU: tests by `make test-gpu`, figures by `make bench-gpu`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributor.core.gpus import driver_version

RESULTS = Path(__file__).parent / "results" / "gpu.json"


def record(part: str, found: Mapping[str, Any], path: Path = RESULTS) -> None:
    """Replace a part of the file, with the machine and the date.

    Parameters
    ----------
    part : str
        "tests" or "benchmarks".
    found : mapping of str to object
        The outcome of each test, or the figures of each benchmark.
    path : Path
        The file.
    """
    results = json.loads(path.read_text()) if path.exists() else {}
    results[part] = {"when": time.strftime("%Y-%m-%d"), "machine": machine(), "found": dict(found)}
    path.write_text(json.dumps(results, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Describe this machine's first GPU and the software that uses it."""
    import torch

    driver = driver_version()
    properties = torch.cuda.get_device_properties(0)
    nccl: Any = torch.cuda.nccl  # which has no types
    return {
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "memory_gb": round(properties.total_memory / 1e9),
        "driver": driver.driver if driver else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl.version())),
        "python": sys.version.split()[0],
    }
