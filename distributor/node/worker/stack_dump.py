"""The Python stacks of ranks, requested by a signal, even if a rank is stuck in C code."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

from distributor._compat.cpython import split_stacks
from distributor.core.procfs import is_in_signal_mask
from distributor.node.worker import control_channel

SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2) - (3 if hasattr(signal, "SIGRTMAX") else 0)
"""A signal that hardly any program uses; batch systems may send SIGUSR1 and SIGUSR2."""
DUMP_SECONDS = 1.0
"""Seconds that ranks have to write their stacks."""
QUIET_SECONDS = 0.05
"""Seconds without another line after which a dump counts as complete: it has no end mark."""
POLL_INTERVAL = 0.01
NO_DUMP = "  (no stack: the process is stopped, or has not started its work)"
_OWN_THREAD = control_channel.__file__
"""The file of the only thread of this package in a rank, which is left out."""


def enable_stack_dumps(descriptor: int) -> None:
    """Have this process write its stacks to a file whenever it receives `SIGNAL`."""
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True)


class DumpTarget(Protocol):
    """A rank's process, and the file to which it writes its stacks."""

    @property
    def pid(self) -> int: ...

    @property
    def answers(self) -> BinaryIO: ...


def dump_stacks(ranks: Mapping[int, DumpTarget]) -> dict[int, str]:
    """Request the stacks of ranks, and wait for them.

    Parameters
    ----------
    ranks : mapping of int to DumpTarget
        The processes, by rank.

    Returns
    -------
    dict of int to str
        The threads of each rank, the most recent call first, without the launcher's own.
    """
    begun = {rank: _size(target) for rank, target in ranks.items()}
    waiting = {rank for rank, target in ranks.items() if _signal(target.pid)}
    sizes, since = dict(begun), time.monotonic()
    deadline = since + DUMP_SECONDS
    while time.monotonic() < deadline:
        now = {rank: _size(ranks[rank]) for rank in waiting}
        if any(now[rank] != sizes[rank] for rank in waiting):
            since = time.monotonic()
        elif time.monotonic() > since + QUIET_SECONDS and all(now[r] > begun[r] for r in waiting):
            break
        sizes |= now
        time.sleep(POLL_INTERVAL)
    return {rank: _read_stack(target, begun[rank]) for rank, target in ranks.items()}


def _signal(pid: int) -> bool:
    """Signal a process, unless it has no handler for the signal, which would then kill it."""
    if not _handles_signal(pid):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, SIGNAL)
        return True
    return False


def _handles_signal(pid: int) -> bool:
    try:
        return is_in_signal_mask(pid, "SigCgt", SIGNAL)
    except FileNotFoundError:
        return not Path("/proc").is_dir()  # other systems than Linux do not show it


def _size(target: DumpTarget) -> int:
    return os.fstat(target.answers.fileno()).st_size


def _read_stack(target: DumpTarget, begun: int) -> str:
    size = _size(target) - begun
    text = os.pread(target.answers.fileno(), size, begun).decode(errors="backslashreplace")
    threads = split_stacks(text)
    return "\n".join(thread for thread in threads if _OWN_THREAD not in thread) or NO_DUMP
