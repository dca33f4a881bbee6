"""Makes a forked process equivalent to a freshly started one."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from distributor.core.module_search import forget_listings
from distributor.core.processes import status_field
from distributor.core.rank_variables import THREADS_VARIABLE

_CPUS = Path("/sys/devices/system/cpu")
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


@dataclass(frozen=True)
class ProcessAttributes:
    """What a child inherits in addition to descriptors, environment and working folder."""

    umask: int
    cpus: frozenset[int]
    limits: dict[int, tuple[int, int]]  # soft and hard ones
    ignored_signals: frozenset[int]
    blocked_signals: frozenset[int]

    @classmethod
    def current(cls) -> ProcessAttributes:
        """Return the attributes of this process and of the calling thread."""
        every_interpreter_ignores = {signal.SIGPIPE, signal.SIGXFSZ}
        return cls(
            umask=_umask(),
            cpus=frozenset(os.sched_getaffinity(0)),
            limits={limit: resource.getrlimit(limit) for limit in _LIMITS},
            ignored_signals=frozenset(
                int(signum)
                for signum in signal.valid_signals() - every_interpreter_ignores
                if signal.getsignal(signum) is signal.SIG_IGN
            ),
            blocked_signals=frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        )

    def change_to(self, wanted: ProcessAttributes) -> None:
        """Change this process, which has these attributes, to have the wanted ones."""
        os.umask(wanted.umask)
        if wanted.cpus != self.cpus:
            os.sched_setaffinity(0, wanted.cpus)
        for limit, pair in wanted.limits.items():
            if pair != self.limits[limit]:
                with contextlib.suppress(OSError, ValueError):  # above what this process may set
                    resource.setrlimit(limit, pair)
        for signum in wanted.ignored_signals - self.ignored_signals:
            signal.signal(signum, signal.SIG_IGN)
        for signum in self.ignored_signals - wanted.ignored_signals:
            default = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
            signal.signal(signum, default)
        signal.pthread_sigmask(signal.SIG_SETMASK, wanted.blocked_signals)


def _umask() -> int:
    # `os.umask` would change it for a moment, for all threads.
    if text := status_field(os.getpid(), "Umask"):
        return int(text, 8)
    umask = os.umask(0o077)  # not every sandbox reports it
    os.umask(umask)
    return umask


def reset_after_fork(
    own_attributes: ProcessAttributes,
    wanted_attributes: ProcessAttributes,
    set_by_imports: Mapping[str, str],
    descriptors: list[int],
) -> None:
    """Make this forked process what a new process, started by the agent, would be.

    The descriptors are those of the pickled environment, the working folder, stdout and stderr.
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
    os.environ.clear()
    os.environ.update({**set_by_imports, **wanted_environment})
    time.tzset()
    _forget_cached_folders()
    _reseed()
    threads_changed = os.environ.get(THREADS_VARIABLE) != threads_before
    if threads_changed or wanted_attributes.cpus != own_attributes.cpus:
        set_thread_counts()


def read_environment(descriptor: int) -> dict[str, str]:
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        variables: dict[str, str] = pickle.load(file)
    return variables


def _forget_cached_folders() -> None:
    """Drop what is cached about the file system's contents, so that it is looked up again."""
    tempfile.tempdir = None
    for path, finder in list(sys.path_importer_cache.items()):
        if finder is None or not os.path.isabs(path):  # it was missing, or relative to another cwd
            del sys.path_importer_cache[path]
    forget_listings()


def _reseed() -> None:
    """Seed the random generators anew; Python's ``random`` does so by itself after a fork."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def set_thread_counts() -> None:
    """Set what the libraries derived from CPU affinity and variables when they were imported."""
    # Imported only here: in a fresh rank, it would set variables before the program.
    from threadpoolctl import ThreadpoolController

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
