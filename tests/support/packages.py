"""Fake packages, environments that contain them, and interpreters; nothing is downloaded."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tarfile
import textwrap
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

NAME = "gadget"
"""The name of a package that does not exist elsewhere."""
HIDING_TORCH = str(Path(__file__).parent / "without_torch")
"""A folder that hides torch from processes that have it on their path."""
PACKAGES = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


def variables_for(source: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return a driver program's environment; torch is hidden if its source does not name it."""
    found = {**os.environ, **variables}
    if not re.search(r"\btorch\b", source):
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [HIDING_TORCH, found.get("PYTHONPATH")]))
    return found


def wheel(folder: Path, version: str, name: str = NAME) -> Path:
    """Write a wheel whose module contains its version."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        packed.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        packed.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        packed.writestr(f"{about}/RECORD", f"{name}.py,,\n{about}/METADATA,,\n{about}/RECORD,,\n")
    return path


def environment(folder: Path, version: str, name: str = NAME, *, bare: bool = False) -> Path:
    """Create an environment with a package and, unless it is bare, this Python's packages."""
    venv.create(folder, symlinks=True)
    packages = folder / PACKAGES
    with zipfile.ZipFile(wheel(folder.with_name(f"{folder.name}-wheels"), version, name)) as made:
        made.extractall(packages)
    if not bare:
        here = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
        (packages / "here.pth").write_text("\n".join(here))
    return folder


def packed(folder: Path, archive: Path) -> Path:
    """Pack an environment as venv-pack and conda-pack do; links stay links."""
    with tarfile.open(archive, "w:gz") as file:
        for entry in sorted(folder.iterdir()):
            file.add(entry, entry.name)
    return archive


def python_that_begins(folder: Path, source: str) -> Path:
    """Make an interpreter: this one, after some lines of its own."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(textwrap.dedent(source))
    python = folder / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'export PYTHONPATH={shlex.quote(str(folder))}"${{PYTHONPATH:+:$PYTHONPATH}}"\n'
        f'exec {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
    return python


ONLY_FROM_ARCHIVES = """
import sys
from importlib.machinery import PathFinder

class OnlyFromArchives:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in ("distributor", "cloudpickle"):
            return None
        archives = [entry for entry in sys.path if entry.endswith(".zip")]
        found = PathFinder.find_spec(name, archives)
        if found is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found

sys.meta_path.insert(0, OnlyFromArchives)
"""
"""Hides an installed package from an interpreter, however it was installed."""
