"""The versions that a machine has of Java, torch, CUDA and NCCL. Nothing heavy is imported."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from distributor.core.linux import parent_pid

JAVA_SECONDS = 20.0
"""Seconds for ``java -version``."""
NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
PACKAGES = ("pyspark", "pyarrow", "cloudpickle")


def versions() -> Mapping[str, str]:
    """Return the versions by name, without what is not installed."""
    from importlib import metadata  # slow to import

    found = {"Python": platform.python_version(), **_torch_versions()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    for name in NCCL_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.setdefault("NCCL", metadata.version(name))
    return found


def java_here() -> tuple[str, str]:
    """Return the path and the version of the Java that Spark would start here, empty if none."""
    home = os.environ.get("JAVA_HOME")
    path = f"{home}/bin/java" if home else shutil.which("java")
    return (path, java_version(path)) if path else ("", "")


def java_above() -> tuple[str, str]:
    """Return the path and the version of the Java that has started this process, empty if none."""
    pid = os.getppid()
    with contextlib.suppress(OSError):  # the process of another user, or not Linux
        while pid:
            path = os.readlink(f"/proc/{pid}/exe")
            if os.path.basename(path) == "java":
                return path, java_version(path)
            pid = parent_pid(pid)
    return "", ""


def java_version(path: str) -> str:
    """Return the version of a Java, such as "17.0.15"; empty if it cannot be run."""
    release = Path(os.path.realpath(path)).parent.parent / "release"
    with contextlib.suppress(OSError):
        if found := re.search(r'^JAVA_VERSION="(.*)"', release.read_text(), re.MULTILINE):
            return found.group(1)
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [path, "-version"], capture_output=True, text=True, timeout=JAVA_SECONDS
        )
        if found := re.search(r'version "(.*?)"', done.stderr + done.stdout):
            return found.group(1)
    return ""


def min_java() -> int:
    """Return the oldest Java on which the installed PySpark runs."""
    from importlib import metadata

    try:
        return 17 if int(metadata.version("pyspark").split(".")[0]) >= 4 else 8
    except metadata.PackageNotFoundError:
        return 8


def java_major(version: str) -> int:
    """Return the major version of a Java: 17 for "17.0.15", 8 for "1.8.0_392"."""
    numbers = [int(number) for number in re.findall(r"\d+", version)] or [0]
    return numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]


def _torch_versions() -> dict[str, str]:
    """Read the versions of torch and of its CUDA from its files: importing it takes seconds."""
    from importlib import metadata

    spec = find_spec("torch")
    if spec is None:
        return {}
    text = ""
    with contextlib.suppress(OSError):
        text = Path(spec.origin or "").with_name("version.py").read_text()
    found = {}
    if version := re.search(r"^__version__ *= *['\"](.*)['\"]", text, re.MULTILINE):
        found["torch"] = version.group(1)
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["torch"] = metadata.version("torch")
    if cuda := re.search(r"^cuda\b.*= *['\"](.*)['\"]", text, re.MULTILINE):
        found["CUDA"] = cuda.group(1)
    return found
