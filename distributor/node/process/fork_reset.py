"""Makes a forked process equivalent to a freshly started one."""

from __future__ import annotations

import importlib.machinery
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from threadpoolctl import ThreadpoolController

from distributor.node.process.ipc import read_environment
from distributor.node.process.preload_spec import THREADS_VARIABLE
from distributor.node.process.process_attributes import ProcessAttributes

_CPUS = Path("/sys/devices/system/cpu")


def reset_after_fork(
    own_attributes: ProcessAttributes,
    wanted_attributes: ProcessAttributes,
    set_by_imports: Mapping[str, str],
    descriptors: list[int],
) -> None:
    """Make this forked process what a new process, started by the agent, would be.

    Parameters
    ----------
    own_attributes, wanted_attributes : ProcessAttributes
        The attributes that this process has, and those of the agent.
    set_by_imports : mapping of str to str
        Environment variables that the modules of this run have set when the zygote imported them:
        in a new process the imports would set them too.
    descriptors : list of int
        Of the pickled environment, the working folder, stdout and stderr; closed here.
    """
    environment, folder, stdout, stderr = descriptors
    os.setsid()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.fchdir(folder)
    own_attributes.change_to(wanted_attributes)
    wanted_environment = read_environment(environment)
    for descriptor in descriptors:
        os.close(descriptor)
    threads_before = os.environ.get(THREADS_VARIABLE)
    _replace_environment({**set_by_imports, **wanted_environment})
    _forget_cached_folders()
    _reseed()
    threads_changed = os.environ.get(THREADS_VARIABLE) != threads_before
    if threads_changed or wanted_attributes.cpus != own_attributes.cpus:
        set_thread_counts()


def _replace_environment(wanted: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(wanted)
    time.tzset()


def _forget_cached_folders() -> None:
    """Drop what is cached about the file system's contents, so that it is looked up again.

    Unlike `importlib.invalidate_caches`, this does not read the archives on the path again.
    """
    tempfile.tempdir = None
    for path, finder in list(sys.path_importer_cache.items()):
        if finder is None or not os.path.isabs(path):  # it was missing, or relative to another cwd
            del sys.path_importer_cache[path]
        elif isinstance(finder, importlib.machinery.FileFinder):
            finder.invalidate_caches()


def _reseed() -> None:
    """Seed the random generators anew; Python's ``random`` does so by itself after a fork."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def set_thread_counts() -> None:
    """Set what the libraries derived from CPU affinity and variables when they were imported."""
    cpus = len(os.sched_getaffinity(0))
    default = _parse_count(os.environ.get(THREADS_VARIABLE), cpus)
    for library in ThreadpoolController().lib_controllers:
        variable = f"{library.internal_api}_NUM_THREADS".upper()
        count = _parse_count(os.environ.get(variable), default)
        library.set_num_threads(min(count, cpus) if library.internal_api == "openblas" else count)
    if torch := sys.modules.get("torch"):
        count = _parse_count(os.environ.get("MKL_NUM_THREADS"), default)
        # By default, torch starts as many threads as MKL.
        torch.set_num_threads(
            min(count, _mkl_limit()) if torch.backends.mkl.is_available() else count
        )


def _mkl_limit() -> float:
    """Return how many threads MKL starts at most: one for each core of the machine."""
    if os.environ.get("MKL_DYNAMIC", "").lower() == "false":
        return math.inf
    cores = {file.read_text() for file in _CPUS.glob("cpu[0-9]*/topology/thread_siblings_list")}
    return len(cores) or os.cpu_count() or 1  # not all containers show the cores


def _parse_count(text: str | None, default: int) -> int:
    first = (text or "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else default
