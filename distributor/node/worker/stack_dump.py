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
from distributor.core.text import listed
from distributor.node.process.signals import is_in_signal_mask
from distributor.node.worker import control_channel

SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2) - (3 if hasattr(signal, "SIGRTMAX") else 0)
"""Which hardly anyone else uses; a batch system may well send SIGUSR1 and SIGUSR2."""
ANSWER_SECONDS = 1.0
QUIET_SECONDS = 0.05
"""Seconds without another line after which an answer is taken as whole: it has no end mark."""
TICK = 0.01
NO_ANSWER = "  (no answer: it is stopped, or has not begun)"
_OWN_THREAD = control_channel.__file__
"""The one thread of the launcher's that has frames of its own."""


def answer_in(descriptor: int) -> None:
    """Have this process write its stacks to a file whenever it is asked."""
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True)


class Asked(Protocol):
    """A rank's process, and the file in which it answers."""

    @property
    def pid(self) -> int: ...

    @property
    def answers(self) -> BinaryIO: ...


def stacks_of(ranks: Mapping[int, Asked]) -> dict[int, str]:
    """Ask ranks for their stacks, and wait for what they answer.

    Returns
    -------
    dict of int to str
        By rank: its threads, the most recent call first, less the launcher's own.
    """
    begun = {rank: _size(asked) for rank, asked in ranks.items()}
    waiting = {rank for rank, asked in ranks.items() if _ask(asked.pid)}
    sizes, since = dict(begun), time.monotonic()
    deadline = since + ANSWER_SECONDS
    while time.monotonic() < deadline:
        now = {rank: _size(ranks[rank]) for rank in waiting}
        if any(now[rank] != sizes[rank] for rank in waiting):
            since = time.monotonic()
        elif time.monotonic() > since + QUIET_SECONDS and all(now[r] > begun[r] for r in waiting):
            break
        sizes |= now
        time.sleep(TICK)
    return {rank: _answer(asked, begun[rank]) for rank, asked in ranks.items()}


def with_stacks(text: str, stacks: Mapping[int, str]) -> str:
    """Add stacks to a text, ranks that stand at the same place together."""
    if not stacks:
        return text
    ranks_at: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        ranks_at.setdefault(stack, []).append(rank)
    places = "\n".join(f"{listed('rank', ranks)}:\n{stack}" for stack, ranks in ranks_at.items())
    return f"{text}\n\nWhere they stood, the most recent call first:\n{places}"


def _ask(pid: int) -> bool:
    """Signal a process, but for one that does not expect it, which that would kill."""
    if not _expects_it(pid):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, SIGNAL)
        return True
    return False


def _expects_it(pid: int) -> bool:
    try:
        return is_in_signal_mask(pid, "SigCgt", SIGNAL)
    except FileNotFoundError:
        return not Path("/proc").is_dir()  # a system that does not tell


def _size(asked: Asked) -> int:
    return os.fstat(asked.answers.fileno()).st_size


def _answer(asked: Asked, begun: int) -> str:
    size = _size(asked) - begun
    text = os.pread(asked.answers.fileno(), size, begun).decode(errors="backslashreplace")
    threads = split_stacks(text)
    return "\n".join(thread for thread in threads if _OWN_THREAD not in thread) or NO_ANSWER
