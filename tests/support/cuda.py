"""What the tests on a GPU share. They need torch, pytest and what `import distributor` needs.

With ``CUDA_TESTS_ON_CPU=1`` their functions run on CPUs, as far as they can. That shows nothing
about GPUs, but finds mistakes in the tests on a machine without one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path("/dev/nvidiactl")
ON_CPU = os.environ.get("CUDA_TESTS_ON_CPU") == "1"
DEADLINE = 120.0


def why_no_gpu() -> str:
    """Return why the tests cannot run here; empty if they can. torch is imported only if needed."""
    if not DRIVER.exists():
        return f"needs a GPU: no NVIDIA driver is loaded ({DRIVER} does not exist)"
    import torch

    if torch.version.cuda is None:
        return f"needs a GPU: torch {torch.__version__} was built without CUDA"
    return "" if torch.cuda.is_available() else "needs a GPU: torch finds none"


NO_GPU = why_no_gpu()
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(bool(NO_GPU) and not ON_CPU, reason=NO_GPU)]
only_on_gpu = pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)
"""For what has no counterpart on CPUs."""


def device_type() -> str:
    """Return "cuda", or "cpu" in a rehearsal. To be called in ranks too."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def until(condition: Callable[[], bool], what: str, seconds: float = DEADLINE) -> None:
    """Wait until a condition holds, or fail."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


def opens_gpu(pid: int) -> bool:
    """Return whether a process has a device of the NVIDIA driver open."""
    folder = Path(f"/proc/{pid}/fd")
    try:
        return any(os.readlink(each).startswith("/dev/nvidia") for each in folder.iterdir())
    except OSError:
        return False  # it has ended, or is not ours


def processes_with_gpu() -> set[int]:
    """Return the processes that have a GPU open."""
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return {pid for pid in pids if opens_gpu(pid)}


def zygotes() -> list[int]:
    """Return the warm processes whose owner is this process."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                command = (path / "cmdline").read_bytes()
            except OSError:
                continue  # the process has ended
            if b"zygote" in command and str(os.getpid()).encode() in command:
                found.append(int(path.name))
    return found


def run_program(source: str, **variables: str | None) -> subprocess.CompletedProcess[str]:
    """Run a driver program in a process of its own; None removes a variable."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    for name, value in variables.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )


def free_memory() -> int:
    """Return the free bytes of the GPU; 0 in a rehearsal."""
    import torch

    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0
