"""The attributes that a child process inherits, for children that another process forks."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from distributor.core.procfs import status_field

_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


@dataclass(frozen=True)
class ProcessAttributes:
    """What a child inherits in addition to descriptors, environment and working folder.

    Parameters
    ----------
    umask : int
        Permissions that new files do not get.
    cpus : frozenset of int
        The CPUs on which the process may run.
    limits : dict of int to pair of int
        Soft and hard resource limits.
    ignored_signals : frozenset of int
        Signals that the process ignores.
    blocked_signals : frozenset of int
        Signals that the calling thread has blocked.
    """

    umask: int
    cpus: frozenset[int]
    limits: dict[int, tuple[int, int]]
    ignored_signals: frozenset[int]
    blocked_signals: frozenset[int]

    @classmethod
    def current(cls) -> ProcessAttributes:
        """Return the attributes of this process and of the calling thread."""
        return cls(
            umask=_umask(),
            cpus=frozenset(os.sched_getaffinity(0)),
            limits={limit: resource.getrlimit(limit) for limit in _LIMITS},
            ignored_signals=frozenset(_ignored_signals()),
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
    """Read the umask; ``os.umask`` would change it for a moment, for all threads."""
    if text := status_field(os.getpid(), "Umask"):
        return int(text, 8)
    umask = os.umask(0o077)  # not every sandbox reports it
    os.umask(umask)
    return umask


def _ignored_signals() -> Iterator[int]:
    """List the ignored signals except for those that every interpreter ignores."""
    ignored_by_python = {signal.SIGPIPE, signal.SIGXFSZ}
    for signum in signal.valid_signals() - ignored_by_python:
        if signal.getsignal(signum) is signal.SIG_IGN:
            yield int(signum)
