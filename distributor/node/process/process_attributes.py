"""What a child inherits from the process that starts it, for children forked by another."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


@dataclass(frozen=True)
class ProcessAttributes:
    """What a process hands down, beside its descriptors, environment and working folder.

    Parameters
    ----------
    umask : int
        Permissions that new files do not get.
    processors : frozenset of int
        Where it may run.
    limits : dict of int to pair of int
        Soft and hard resource limits.
    ignored, blocked : frozenset of int
        Signals that it ignores, and those that the calling thread has blocked.
    """

    umask: int
    processors: frozenset[int]
    limits: dict[int, tuple[int, int]]
    ignored: frozenset[int]
    blocked: frozenset[int]

    @classmethod
    def current(cls) -> ProcessAttributes:
        """Describe this process, and the thread that asks."""
        return cls(
            umask=_umask(),
            processors=frozenset(os.sched_getaffinity(0)),
            limits={limit: resource.getrlimit(limit) for limit in _LIMITS},
            ignored=frozenset(_ignored()),
            blocked=frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        )

    def adopt(self, others: ProcessAttributes) -> None:
        """Make this process, which has these surroundings, have those of another."""
        os.umask(others.umask)
        if others.processors != self.processors:
            os.sched_setaffinity(0, others.processors)
        for limit, pair in others.limits.items():
            if pair != self.limits[limit]:
                with contextlib.suppress(OSError, ValueError):  # above what this process may have
                    resource.setrlimit(limit, pair)
        for signum in others.ignored - self.ignored:
            signal.signal(signum, signal.SIG_IGN)
        for signum in self.ignored - others.ignored:
            usual = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
            signal.signal(signum, usual)
        signal.pthread_sigmask(signal.SIG_SETMASK, others.blocked)


def _umask() -> int:
    """Read it; ``os.umask`` would change it for a moment, for all threads."""
    status = Path("/proc/self/status").read_text()
    if found := status.partition("Umask:")[2].split():
        return int(found[0], 8)
    umask = os.umask(0o077)  # not every sandbox says it
    os.umask(umask)
    return umask


def _ignored() -> Iterator[int]:
    """List the ignored signals, less those that an interpreter sets by itself."""
    own = {signal.SIGPIPE, signal.SIGXFSZ}
    for signum in signal.valid_signals() - own:
        if signal.getsignal(signum) is signal.SIG_IGN:
            yield int(signum)
