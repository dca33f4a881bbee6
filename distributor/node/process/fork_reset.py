"""Makes a forked process equivalent to a freshly started one."""

from __future__ import annotations

import importlib.machinery
import os
import sys
import tempfile
import time
from collections.abc import Mapping

from threadpoolctl import ThreadpoolController

from distributor.node.process.ipc import environment_in
from distributor.node.process.preload_spec import THREADS
from distributor.node.process.process_attributes import ProcessAttributes


def become(
    ours: ProcessAttributes,
    theirs: ProcessAttributes,
    born_with: Mapping[str, str],
    descriptors: list[int],
) -> None:
    """Make this process what the agent would have started.

    Parameters
    ----------
    ours, theirs : ProcessAttributes
        Those of this process, and those of the agent.
    born_with : mapping of str to str
        The environment that this process's ancestor was started with: what is there beyond it was
        set by the modules that it imported, as they would here.
    descriptors : list of int
        Of the pickled environment, the working folder, stdout and stderr; closed here.
    """
    environment, folder, stdout, stderr = descriptors
    os.setsid()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.fchdir(folder)
    ours.adopt(theirs)
    wanted = environment_in(environment)
    for descriptor in descriptors:
        os.close(descriptor)
    threads_before = os.environ.get(THREADS)
    set_by_imports = dict(os.environ.items() - born_with.items())
    os.environ.clear()
    os.environ.update(set_by_imports | wanted)
    time.tzset()
    _forget_folders()
    _reseed()
    if os.environ.get(THREADS) != threads_before or theirs.processors != ours.processors:
        _set_threads()


def _forget_folders() -> None:
    """Look again at what lies where, as a fresh start would.

    Unlike importlib's own way to do that, it reads no archive anew.
    """
    tempfile.tempdir = None
    for path, finder in list(sys.path_importer_cache.items()):
        if finder is None or not os.path.isabs(path):  # nothing was there, or somewhere else
            del sys.path_importer_cache[path]
        elif isinstance(finder, importlib.machinery.FileFinder):
            finder.invalidate_caches()


def _reseed() -> None:
    """Draw new numbers, as a fresh start would; ``random`` sees to itself."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _set_threads() -> None:
    """Do what the libraries did with these variables when they were imported."""
    processors = len(os.sched_getaffinity(0))
    common = _number(os.environ.get(THREADS), processors)
    for library in ThreadpoolController().lib_controllers:
        own = f"{library.internal_api}_NUM_THREADS".upper()
        library.set_num_threads(_number(os.environ.get(own), common))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(_number(os.environ.get("MKL_NUM_THREADS"), common))


def _number(text: str | None, default: int) -> int:
    first = (text or "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else default
