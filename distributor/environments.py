"""The environment that ranks run in: checks it, sends it to executors, or prepares it here."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import stat
import sys
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from distributor.node.environment.cache import build_once, cache_folder, with_default_cache
from distributor.node.environment.resolve import PreparedEnvironment, use_packed, use_requirements
from distributor.screen.messages import notify
from distributor.settings.fields import conf_cache_dir
from distributor.spark.package_shipping import send_archive
from distributor.spark.session import Session
from distributor.spark.user_modules import own_folders

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


Environment: TypeAlias = str | os.PathLike[str] | Sequence[str] | None
"""A packed environment's path, or requirements; None for the installed interpreter."""
NOTICE_SECONDS = 5.0
"""Seconds after which the user is notified that the environment is not ready."""
PACK = "Pack a virtual environment with venv-pack or conda-pack (-o environment.tar.gz)."


def check_environment(environment: object) -> None:
    """Check the environment before anything is launched."""
    if isinstance(environment, (str, os.PathLike)):
        _check_archive(Path(environment))
    elif isinstance(environment, Sequence) and all(isinstance(entry, str) for entry in environment):
        for requirement in environment:
            _check_requirement(requirement)
    elif environment is not None:
        raise TypeError(
            "environment is the path of a packed environment, or a list of requirements such as "
            f"['einops==0.8.1'], but is {environment!r}."
        )


def ship_environment(session: Session, environment: Environment) -> str | tuple[str, ...] | None:
    """Send a packed environment to every executor, which unpacks it, once while it is unchanged."""
    if not environment:
        return None
    if not isinstance(environment, (str, os.PathLike)):
        return tuple(environment)
    archive = Path(environment).absolute()
    name = f"distributor-environment-{_digest(archive)}"
    send_archive(session, name, archive)
    return name


@contextlib.contextmanager
def prepared_here(
    environment: Environment, env: Mapping[str, str], deadline: float
) -> Iterator[PreparedEnvironment | None]:
    """Prepare an environment on this machine, which is in use within this context."""
    if not environment:
        yield None
        return
    variables = with_default_cache({**os.environ, **env}, conf_cache_dir(Session.active()))
    notice = threading.Timer(
        NOTICE_SECONDS, notify, ["Waiting: the environment is not ready here."]
    )
    notice.daemon = True
    notice.start()
    with contextlib.ExitStack() as stack:
        try:
            prepared = stack.enter_context(_prepared(environment, variables, deadline))
        finally:
            notice.cancel()
        yield prepared


@contextlib.contextmanager
def _prepared(
    environment: str | os.PathLike[str] | Sequence[str],
    variables: Mapping[str, str],
    deadline: float,
) -> Iterator[PreparedEnvironment]:
    beside = [str(folder) for folder in own_folders()]
    if not isinstance(environment, (str, os.PathLike)):
        with use_requirements(tuple(environment), variables, deadline, beside) as prepared:
            yield prepared
        return
    archive = Path(environment).absolute()
    folder = cache_folder(variables) / f"environment-{_digest(archive)}"
    with (
        build_once(folder, lambda folder, lock: unpack(archive, folder), deadline),
        use_packed(folder, variables, deadline, beside) as prepared,
    ):
        yield prepared


def _check_archive(archive: Path) -> None:
    if archive.is_dir():
        raise IsADirectoryError(
            f"environment needs a packed environment, but '{archive}' is a folder. {PACK}"
        )
    if not archive.is_file():
        raise FileNotFoundError(
            f"There is no packed environment '{archive}' (looked from {Path.cwd()}). {PACK}"
        )
    if not archive.name.endswith(SUFFIXES):
        raise ValueError(
            f"environment is '{archive}', but a packed environment ends in {', '.join(SUFFIXES)}. "
            f"{PACK} Requirements are given as a list of strings."
        )
    found, above = _python_in(archive, _digest(archive))
    if found is None:
        raise ValueError(
            f"environment is '{archive}', in which there is no lib/pythonX.Y: it is not a "
            f"packed environment for this system. {PACK}"
        )
    if above:
        raise ValueError(
            f"environment is '{archive}', which has lib and bin in a folder '{above}'. They "
            f"must be at the top. {PACK}"
        )
    ours = "{}.{}".format(*sys.version_info)
    if found != ours:
        raise ValueError(
            f"environment is '{archive}' with Python {found}, and this process runs Python {ours}: "
            f"they cannot read each other's pickles. Pack an environment with Python {ours}."
        )


@functools.cache
def _python_in(archive: Path, digest: str) -> tuple[str | None, str | None]:
    """Return the version of the Python in an archive, and the folder in the archive above it."""
    try:
        found = find_python_library(archive)
    except READ_ERRORS as error:
        raise ValueError(
            f"environment is '{archive}', which cannot be read as an archive: {error}. {PACK}"
        ) from error
    return (found["version"], found["above"]) if found else (None, None)


def _check_requirement(requirement: str) -> None:
    if not requirement.strip() or requirement.lstrip().startswith(("-", "#")):
        raise ValueError(
            f"environment lists requirements such as 'einops==0.8.1', but has {requirement!r}. "
            "Options are variables: env={'PIP_INDEX_URL': ...}, or UV_DEFAULT_INDEX for uv."
        )


def _digest(archive: Path) -> str:
    """Return a digest of the archive's path, size and time, without reading it."""
    status = archive.stat()
    state = f"{archive.absolute()}\0{status.st_size}\0{status.st_mtime_ns}"
    return hashlib.sha256(os.fsencode(state)).hexdigest()[:16]
