"""Fake packages, and environments that contain them; nothing is downloaded."""

from __future__ import annotations

import os
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

NAME = "gadget"
"""The name of a package that does not exist elsewhere."""
PACKAGES = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


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
    if archive.suffix == ".zip":
        _zip(folder, archive)
    else:
        with tarfile.open(archive, "w:gz") as file:
            for entry in sorted(folder.iterdir()):
                file.add(entry, entry.name)
    return archive


def _zip(folder: Path, archive: Path) -> None:
    with zipfile.ZipFile(archive, "w") as file:
        for above, folders, names in os.walk(folder):
            for name in [*folders, *names]:
                path = Path(above, name)
                place = str(path.relative_to(folder))
                if path.is_symlink():
                    link = zipfile.ZipInfo(place)
                    link.external_attr = path.lstat().st_mode << 16
                    file.writestr(link, os.readlink(path))
                elif path.is_file():
                    file.write(path, place)
