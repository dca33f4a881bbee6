"""The Python stacks of ranks, requested by a signal, even if a rank is stuck in C code.

Their last collectives are in front of them, from ranks that can still run Python.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import pkgutil
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Protocol

from distributor._compat.cpython import split_stacks
from distributor._compat.torch import recorded_collectives
from distributor.core.cell_errors import cell_name, with_cell_names
from distributor.core.processes import is_in_signal_mask
from distributor.core.text import listed
from distributor.node.worker import control_channel
from distributor.rank.messages import COLLECTIVES

# A signal that hardly any program uses; batch systems may send SIGUSR1 and SIGUSR2.
SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2) - (3 if hasattr(signal, "SIGRTMAX") else 0)
DUMP_SECONDS = 1.0  # that ranks have to write their stacks
COLLECTIVES_SECONDS = 1.0  # for their last collectives; those that cannot run Python write none
QUIET_SECONDS = 0.05  # without another line: a dump is complete, which has no end mark
POLL_INTERVAL = 0.01
NO_DUMP = "  (no stack: the process is stopped, or has not started its work)"
MAX_COLLECTIVES = 3  # of a rank that are shown
_COLLECTIVES = "collectives"  # the file in a rank's scratch folder
# The file of the only lasting thread of this package in a rank, which is left out.
_OWN_THREAD = control_channel.__file__

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_THREAD = re.compile(r"^.*[Tt]hread.*\(most recent call first\):$", re.MULTILINE)
_SENT = "/distributor-modules-"  # part of the folders with the user's modules on nodes
# The oldest frames of a rank, which have called the user's program.
_LAUNCHERS = re.compile(
    r'(?<=\n)(?:  File "(?:[^"\n]*/distributor/node/[^"\n]*|<string>|<frozen runpy>)", '
    r".*(?:\n|\Z))+\Z"
)
# Functions that are not what the user called, such as those of torch's decorators.
_INTERNAL = re.compile(r"^_|wrapper$")


def enable_stack_dumps(descriptor: int) -> None:
    """Have this process write its stacks to a file whenever it receives `SIGNAL`."""
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True)


def write_collectives(scratch: str) -> None:
    """Write this process's last collectives to its scratch folder, for `dump_stacks`."""

    def write() -> None:
        path = Path(scratch, _COLLECTIVES)
        partial = path.with_suffix(".partial")
        with contextlib.suppress(OSError):  # there is no folder, or its disk is full
            lines = map(_describe_collective, recorded_collectives()[-MAX_COLLECTIVES:])
            partial.write_text("\n".join(lines))
            partial.replace(path)

    # A thread of its own: torch may have to wait for a GPU.
    threading.Thread(target=write, name="collectives", daemon=True).start()


def _describe_collective(entry: Mapping[str, Any]) -> str:
    state = "completed" if entry.get("retired") else entry.get("state")
    name, number = entry.get("profiling_name"), entry.get("collective_seq_id")
    group, sizes = entry.get("process_group", [""])[-1], entry.get("input_sizes")
    return f"  {name}, number {number} of {group}, sizes {sizes}: {state}"


class DumpTarget(Protocol):
    """A rank's process, and the files to which it writes its stacks and collectives."""

    scratch: str
    answers: BinaryIO

    @property
    def pid(self) -> int: ...

    def send(self, message: bytes) -> None: ...


def dump_stacks(ranks: Mapping[int, DumpTarget]) -> dict[int, str]:
    """Request the stacks of ranks, and wait for them.

    Returned are the threads of each rank, the most recent call first, without the launcher's own,
    after its last collectives.
    """
    begun = {rank: _size(target) for rank, target in ranks.items()}
    waiting = {rank for rank, target in ranks.items() if _signal(target.pid)}
    sizes, since = {rank: begun[rank] for rank in waiting}, time.monotonic()
    deadline = since + DUMP_SECONDS
    while time.monotonic() < deadline:
        now = {rank: _size(ranks[rank]) for rank in waiting}
        if now != sizes:
            sizes, since = now, time.monotonic()
        elif time.monotonic() > since + QUIET_SECONDS and all(now[r] > begun[r] for r in waiting):
            break
        time.sleep(POLL_INTERVAL)
    # After their stacks: it takes a thread of theirs.
    for rank in waiting:
        ranks[rank].send(COLLECTIVES)
    deadline = time.monotonic() + COLLECTIVES_SECONDS
    paths = [_collectives_of(ranks[rank]) for rank in waiting]
    while time.monotonic() < deadline and not all(path.exists() for path in paths):
        time.sleep(POLL_INTERVAL)
    return {
        rank: _read_collectives(target) + _read_stack(target, begun[rank])
        for rank, target in ranks.items()
    }


def _signal(pid: int) -> bool:
    """Signal a process, unless it has no handler for the signal, which would then kill it."""
    try:
        handles_signal = is_in_signal_mask(pid, "SigCgt", SIGNAL)
    except FileNotFoundError:
        handles_signal = not Path("/proc").is_dir()  # other systems than Linux do not show it
    if handles_signal:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)
            return True
    return False


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


def append_stacks(text: str, stacks: Mapping[int, str]) -> str:
    """Append the stacks of ranks to a text, after a line for each place at which ranks are."""
    if not stacks:
        return text
    shown = {rank: _shown(stack) for rank, stack in stacks.items()}
    parts = "".join(f"{ranks}:\n{stack}\n" for stack, ranks in _grouped(shown).items())
    places = _grouped({rank: place_of(stack) for rank, stack in stacks.items()})
    summary = "".join(f"\n  {ranks}: {place}" for place, ranks in places.items() if place)
    if summary:
        text = f"{text}\n\nWhere the ranks are:{summary}"
    return f"{text}\n\nStacks of the ranks, the most recent call first:\n{parts}".rstrip("\n")


@functools.cache
def _library() -> re.Pattern[str]:
    """Return what matches files that are not the user's."""
    package = __name__.partition(".")[0]
    # A node may have this package elsewhere; a user's folder may have the same name.
    own = "|".join(each.name for each in pkgutil.iter_modules(sys.modules[package].__path__))
    return re.compile(
        r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|^<(?:frozen |string>)"
        rf"|/{package}/(?:{own})(?:/|\.py$)"
    )


def _grouped(text_by_rank: Mapping[int, str]) -> dict[str, str]:
    """Return the ranks that have each text, as text."""
    ranks_with: dict[str, list[int]] = {}
    for rank, text in sorted(text_by_rank.items()):
        ranks_with.setdefault(text, []).append(rank)
    return {text: listed("rank", ranks) for text, ranks in ranks_with.items()}


def _shown(stack: str) -> str:
    """Omit the oldest frames if they are this package's, unless there are no others.

    The header above all stacks has the order of the calls, and names the ranks' only threads.
    """
    shorter = _LAUNCHERS.sub("", stack)
    if _FRAME.search(_THREAD.split(shorter)[-1]):
        stack = shorter.rstrip("\n")
    only = _THREAD.match(stack) if len(_THREAD.findall(stack)) == 1 else None
    stack = stack[only.end() + 1 :] if only else stack.replace(" (most recent call first):", ":")
    return with_cell_names(stack)


# The innermost frame of a rank that waits in a collective, in a backward pass or in a report.
_COLLECTIVE = re.compile(
    r"/torch/(?:autograd/graph|nn/parallel/distributed|distributed/.*)\.py$"
    r"|/distributor/(?:rank/(?:store_channel|membership)|train/runtime/\w+|train/collective)\.py$"
)
_STANDARD = re.compile(r"/lib(?:64)?/python\d[\d.]*/(?!(?:site|dist)-packages/)")


def waits_for_others(stack: str) -> bool:
    """Return whether a rank is in a call that may wait for other ranks."""
    frames = _FRAME.findall(_THREAD.split(stack)[-1])
    own = (file for file, _, _ in frames if not _STANDARD.search(file))
    return bool(_COLLECTIVE.search(next(own, "")))


def collective_number(stack: str) -> int | None:
    """Return the number of the last collective that torch has recorded in front of a stack."""
    numbers = re.findall(r"^  .*, number (\d+) of ", stack, re.MULTILINE)
    return int(numbers[-1]) if numbers else None


def place_of(stack: str) -> str:
    """Return the user's line at which a rank's main thread is, and what it called there.

    Empty if the stack has no line of the user's.
    """
    main_thread = _THREAD.split(stack)[-1]  # faulthandler writes the oldest thread last
    called = ""
    for file, line, function in _FRAME.findall(main_thread):
        if _SENT in file or not _library().search(file):
            place = f"{function} ({cell_name(file) or PurePath(file).name}:{line})"
            return f"in {called}, called by {place}" if called else f"in {place}"
        if not _INTERNAL.search(function):
            called = function
    return ""
