"""The Java that Spark runs on."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

ANSWER_SECONDS = 20.0
"""Seconds for ``java -version``."""


def java_here() -> tuple[str, str]:
    """Return the path and the version of the Java that Spark would start here, empty if none."""
    home = os.environ.get("JAVA_HOME")
    path = f"{home}/bin/java" if home else shutil.which("java")
    return (path, java_version(path)) if path else ("", "")


def java_version(path: str) -> str:
    """Return the version of a Java, such as "17.0.15"; empty if it cannot be run."""
    release = Path(os.path.realpath(path)).parent.parent / "release"
    with contextlib.suppress(OSError):
        if found := re.search(r'^JAVA_VERSION="(.*)"', release.read_text(), re.MULTILINE):
            return found.group(1)
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [path, "-version"], capture_output=True, text=True, timeout=ANSWER_SECONDS
        )
        if found := re.search(r'version "(.*?)"', done.stderr + done.stdout):
            return found.group(1)
    return ""


def min_java() -> int:
    """Return the oldest Java on which the installed PySpark runs."""
    try:
        return 17 if int(metadata.version("pyspark").split(".")[0]) >= 4 else 8
    except metadata.PackageNotFoundError:
        return 8


def java_major(version: str) -> int:
    """Return the major version of a Java: 17 for "17.0.15", 8 for "1.8.0_392"."""
    numbers = [int(number) for number in re.findall(r"\d+", version)] or [0]
    return numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]


def problem_of(path: str, version: str, least: int) -> str:
    """Return why Spark cannot run on a Java; empty if it can.

    Parameters
    ----------
    path, version : str
        The Java, and its version; empty if there is none.
    least : int
        The oldest major version that Spark runs on.
    """
    if not path:
        return "There is no Java: JAVA_HOME is unset, and PATH has none."
    if not version:
        return f"{path} does not run, or reports no version."
    if java_major(version) < least:
        return f"Java {version} at {path} is too old for Spark."
    return ""


def how_to_install(least: int) -> str:
    """Return what to do without a Java that is new enough."""
    return (
        f"Install Java {least} or later (Debian and Ubuntu: apt-get install "
        f"openjdk-{max(least, 17)}-jre-headless; Fedora: dnf install "
        f"java-{max(least, 17)}-openjdk-headless; macOS: brew install openjdk@{max(least, 17)}), "
        "and set JAVA_HOME to it or put its java on PATH."
    )


def why_no_java() -> str:
    """Return why Spark cannot start here, and what to do; empty if it can."""
    least = min_java()
    if problem := problem_of(*java_here(), least):
        return f"Spark needs Java {least} or later. {problem} {how_to_install(least)}"
    return ""
