"""Requests the stacks of the ranks of active runs."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

ANSWER_SECONDS = 10.0
"""Seconds for the nodes of a run to answer."""

_lock = threading.Lock()
_going_on: dict[str, Inquiry] = {}


class Inquiry:
    """One run's way to be asked; its launcher sets ``ask``, and answers."""

    def __init__(self) -> None:
        self.ask: Callable[[], object] = lambda: None
        self._waiting: queue.SimpleQueue[queue.SimpleQueue[dict[int, str]]] = queue.SimpleQueue()

    def stacks(self) -> dict[int, str]:
        """Ask, and wait for the answer; nothing where none comes, for the run is ending."""
        answer: queue.SimpleQueue[dict[int, str]] = queue.SimpleQueue()
        self._waiting.put(answer)
        self.ask()
        try:
            return answer.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            return {}

    def answer(self, stacks: dict[int, str]) -> None:
        """Answer all who have asked."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.get_nowait().put(stacks)


@contextlib.contextmanager
def register_run(run_id: str, inquiry: Inquiry) -> Iterator[None]:
    """Let a run be asked while it goes on."""
    with _lock:
        _going_on[run_id] = inquiry
    try:
        yield
    finally:
        with _lock:
            del _going_on[run_id]


def stacks() -> dict[str, dict[int, str]]:
    """Find out where the ranks of this process's runs stand; the runs go on.

    To be called from another thread than the one that waits for the run. On the command line of
    ``distributor run``, Ctrl-Backslash shows the same.

    Returns
    -------
    dict of str to dict of int to str
        For each run that goes on, by its id: the Python stacks of its ranks that are at work, by
        rank, the most recent call first. Ranks of a node that has no link to this process are
        not in it.
    """
    with _lock:
        asked = dict(_going_on)
    return {run_id: inquiry.stacks() for run_id, inquiry in asked.items()}
