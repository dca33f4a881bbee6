"""What a machine has, as plain data: the same on the driver and on executors."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from distributor.core.addresses import resolve
from distributor.core.gpus import DriverVersion, driver_version, gpu_names
from distributor.core.resources import SHARED_MEMORY
from distributor.diagnosis.installed import java_above, java_here, versions
from distributor.node.agent.memory import memory_warnings

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which users choose a network interface."""


@dataclass(frozen=True)
class Space:
    """The space of a file system.

    Parameters
    ----------
    folder : str
        A folder in it.
    free, total : int
        Bytes.
    """

    folder: str
    free: int
    total: int


@dataclass(frozen=True)
class Machine:
    """What a machine has.

    Parameters
    ----------
    host : str
        Its name.
    python : str
        The path of the interpreter.
    java, java_path : str
        The version and the path of Java; empty if there is none.
    versions : mapping of str to str
        The versions of Python and packages, by name.
    driver : DriverVersion or None
        The version of the NVIDIA driver.
    gpus : tuple of str
        The names of the GPUs.
    shared_memory : Space or None
        The space for shared memory.
    disks : tuple of Space
        The space in the folders that Spark and ranks write to.
    open_files : int
        The soft limit of open file descriptors; -1 for none.
    memory : tuple of str
        Why ranks may have too little memory.
    unresolved : str
        Why the host's name cannot be resolved; empty if it can.
    interfaces : mapping of str to str
        Variables that name a network interface which does not exist, with its name.
    """

    host: str
    python: str
    java: str
    java_path: str
    versions: Mapping[str, str]
    driver: DriverVersion | None
    gpus: tuple[str, ...]
    shared_memory: Space | None
    disks: tuple[Space, ...]
    open_files: int
    memory: tuple[str, ...]
    unresolved: str
    interfaces: Mapping[str, str]


def examine(host: str, folders: Iterable[str], ranks: int, *, in_executor: bool) -> Machine:
    """Collect what this machine has.

    Parameters
    ----------
    host : str
        The name by which others know it.
    folders : iterable of str
        Folders that Spark and ranks write to, beside the temporary one.
    ranks : int
        The number of ranks that a run would start here.
    in_executor : bool
        Whether this process is the Python worker of an executor.
    """
    java_path, java = java_above() if in_executor else java_here()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = memory_warnings(ranks, 1, warm=True, is_warm=lambda: False) if ranks else ()
    return Machine(
        host=host,
        python=sys.executable,
        java=java,
        java_path=java_path,
        versions=dict(versions()),
        driver=driver_version(),
        gpus=tuple(gpu_names()),
        shared_memory=_space(SHARED_MEMORY),
        disks=_disks([*folders, tempfile.gettempdir()]),
        open_files=-1 if soft == resource.RLIM_INFINITY else soft,
        memory=tuple(" ".join(filter(None, (each.text, each.detail))) for each in needed),
        unresolved=_why_unresolved(host),
        interfaces=_missing_interfaces(),
    )


def _disks(folders: Iterable[str]) -> tuple[Space, ...]:
    """Return the space in each folder, without folders of the same file system."""
    by_device: dict[int, Space] = {}
    for folder in dict.fromkeys(folders):
        if (space := _space(folder)) is not None:
            by_device.setdefault(os.stat(folder).st_dev, space)
    return tuple(by_device.values())


def _space(folder: str) -> Space | None:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return Space(folder, usage.free, usage.total)


def _why_unresolved(host: str) -> str:
    try:
        resolve(host)
    except OSError as error:
        return str(error)
    return ""


def _missing_interfaces() -> dict[str, str]:
    """Return the variables that name no interface of this machine, with their values."""
    existing = [name for _, name in socket.if_nameindex()]
    missing = {}
    for variable in INTERFACE_VARIABLES:
        value = os.environ.get(variable, "")
        is_list = value[:1] not in ("", "^", "=")  # NCCL can also exclude, and match exactly
        # gloo takes names, and NCCL takes prefixes of names.
        accepts = str.startswith if variable.startswith("NCCL") else str.__eq__
        names = value.split(",")
        if is_list and not any(accepts(each, name) for each in existing for name in names):
            missing[variable] = value
    return missing
