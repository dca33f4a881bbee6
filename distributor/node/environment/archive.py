"""Packed environments: which formats are supported, and how one is unpacked."""

from __future__ import annotations

import os
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIXES = (".tar.gz", ".tgz", ".tar", ".zip")  # of the archives that Spark unpacks
# What reading a damaged archive raises.
READ_ERRORS = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError)
_LIBRARY = re.compile(r"(?:\./)?(?P<above>[^/]+/)?lib/python(?P<version>\d+\.\d+)/")


def find_python_library(archive: Path) -> re.Match[str] | None:
    """Find the first file of a Python's library in an archive, and read no further.

    Its groups are ``version``, such as "3.11", and ``above``, the folder in the archive that
    contains the environment, or None if the environment is at the top.
    """
    for name in _names_in(archive):
        if found := _LIBRARY.match(name):
            return found
    return None


def _names_in(archive: Path) -> Iterator[str]:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            yield from packed.namelist()
    else:
        with tarfile.open(archive) as packed_tar:
            for member in packed_tar:
                yield f"{member.name}/" if member.isdir() else member.name


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive with its links and permissions, as Spark would."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            for member in packed.infolist():
                _extract(packed, member, folder)
    else:
        # The "data" filter would refuse the links to the base interpreter, outside of the folder.
        safely: dict[str, Any] = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}
        with tarfile.open(archive) as packed_tar:
            packed_tar.extractall(folder, **safely)


def _extract(packed: zipfile.ZipFile, member: zipfile.ZipInfo, folder: Path) -> None:
    mode = member.external_attr >> 16
    path = folder / member.filename
    # A file is written through a link of its name; a link is not.
    written = path.parent if stat.S_ISLNK(mode) else path
    if not written.resolve().is_relative_to(folder.resolve()):
        raise zipfile.BadZipFile(f"{member.filename} would be written outside of the folder")
    if stat.S_ISLNK(mode):
        path.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(packed.read(member), os.fsencode(path))
        return
    extracted = packed.extract(member, folder)
    if mode:
        os.chmod(extracted, stat.S_IMODE(mode))
