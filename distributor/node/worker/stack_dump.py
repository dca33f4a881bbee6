"""The Python stacks of ranks, requested by a signal, even if a rank is stuck in C code.

Their last collectives are in front of them, from ranks that can still run Python.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from distributor._compat.cpython import split_stacks
from distributor._compat.torch import recorded_collectives
from distributor.core.procfs import is_in_signal_mask
from distributor.node.worker import control_channel
from distributor.rank.messages import COLLECTIVES

SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2) - (3 if hasattr(signal, "SIGRTMAX") else 0)
"""A signal that hardly any program uses; batch systems may send SIGUSR1 and SIGUSR2."""
DUMP_SECONDS = 1.0
"""Seconds that ranks have to write their stacks."""
COLLECTIVES_SECONDS = 1.0
"""Seconds that ranks have to write their last collectives; those that cannot run Python do not."""
QUIET_SECONDS = 0.05
"""Seconds without another line after which a dump counts as complete: it has no end mark."""
POLL_INTERVAL = 0.01
NO_DUMP = "  (no stack: the process is stopped, or has not started its work)"
MAX_COLLECTIVES = 3
"""Collectives of a rank that are shown."""
_COLLECTIVES = "collectives"
"""The file in a rank's scratch folder."""
_OWN_THREAD = control_channel.__file__
"""The file of the only lasting thread of this package in a rank, which is left out."""


def enable_stack_dumps(descriptor: int) -> None:
    """Have this process write its stacks to a file whenever it receives `SIGNAL`."""
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True)


def write_collectives(scratch: str) -> None:
    """Write this process's last collectives to its scratch folder, for `dump_stacks`.

    A thread of its own does that: torch may have to wait for a GPU.
    """

    def write() -> None:
        path = Path(scratch, _COLLECTIVES)
        partial = path.with_suffix(".partial")
        with contextlib.suppress(OSError):  # there is no folder, or its disk is full
            lines = map(_describe_collective, recorded_collectives()[-MAX_COLLECTIVES:])
            partial.write_text("\n".join(lines))
            partial.replace(path)

    threading.Thread(target=write, name="collectives", daemon=True).start()


def _describe_collective(entry: Mapping[str, Any]) -> str:
    state = "completed" if entry.get("retired") else entry.get("state")
    name, number = entry.get("profiling_name"), entry.get("collective_seq_id")
    group, sizes = entry.get("process_group", [""])[-1], entry.get("input_sizes")
    return f"  {name}, number {number} of {group}, sizes {sizes}: {state}"


class DumpTarget(Protocol):
    """A rank's process, and the files to which it writes its stacks and collectives."""

    @property
    def pid(self) -> int: ...

    @property
    def scratch(self) -> str: ...

    def send(self, message: bytes) -> None: ...

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
        The threads of each rank, the most recent call first, without the launcher's own, after
        its last collectives.
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
    _await_collectives([ranks[rank] for rank in waiting])
    return {
        rank: _read_collectives(target) + _read_stack(target, begun[rank])
        for rank, target in ranks.items()
    }


def _await_collectives(ranks: Sequence[DumpTarget]) -> None:
    """Have ranks write their last collectives, after their stacks: it takes a thread of theirs."""
    for target in ranks:
        target.send(COLLECTIVES)
    deadline = time.monotonic() + COLLECTIVES_SECONDS
    while time.monotonic() < deadline and not all(_collectives_of(each).exists() for each in ranks):
        time.sleep(POLL_INTERVAL)


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


def _read_collectives(target: DumpTarget) -> str:
    path = _collectives_of(target)
    try:
        text = path.read_text()
        path.unlink()
    except OSError:  # it cannot run Python
        return ""
    return f"Last collectives:\n{text}\n" if text else ""


def _collectives_of(target: DumpTarget) -> Path:
    return Path(target.scratch, _COLLECTIVES)


def _read_stack(target: DumpTarget, begun: int) -> str:
    size = _size(target) - begun
    text = os.pread(target.answers.fileno(), size, begun).decode(errors="backslashreplace")
    threads = split_stacks(text)
    return "\n".join(thread for thread in threads if _OWN_THREAD not in thread) or NO_DUMP
