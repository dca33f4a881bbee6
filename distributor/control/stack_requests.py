"""Requests for the stacks of the ranks of active runs."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

ANSWER_TIMEOUT = 10.0
"""Seconds for the nodes of a run to answer."""

_lock = threading.Lock()
_active: dict[str, StackRequests] = {}


class StackRequests:
    """Requests for the stacks of one attempt's ranks. Its controller sets ``send``, and answers."""

    def __init__(self) -> None:
        self.send: Callable[[], object] | None = None
        self._waiting: queue.SimpleQueue[queue.SimpleQueue[dict[int, str]]] = queue.SimpleQueue()

    def stacks(self) -> dict[int, str]:
        """Send a request and wait for the answer; empty if the run has not begun, or ends."""
        if self.send is None:
            return {}
        answer: queue.SimpleQueue[dict[int, str]] = queue.SimpleQueue()
        self._waiting.put(answer)
        self.send()
        try:
            return answer.get(timeout=ANSWER_TIMEOUT)
        except queue.Empty:
            return {}

    def answer(self, stacks: dict[int, str]) -> None:
        """Answer all waiting requests."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.get_nowait().put(stacks)


@contextlib.contextmanager
def register_run(run_id: str, requests: StackRequests) -> Iterator[None]:
    """Make an attempt available to `stacks` while it is active."""
    with _lock:
        _active[run_id] = requests
    try:
        yield
    finally:
        with _lock:
            del _active[run_id]


def stacks() -> dict[str, dict[int, str]]:
    """Return the Python stacks of the ranks of this process's active runs, which continue.

    Must be called from another thread than the one that waits for the run, for example while
    a run of `TorchDistributor.submit` is active. ``distributor run`` prints the same on
    Ctrl-Backslash. Ranks that are stuck in C code are included, because ``faulthandler`` dumps
    the stacks: https://docs.python.org/3/library/faulthandler.html.

    Returns
    -------
    dict of str to dict of int to str
        For each active run, by its id: the stacks of its running ranks, by rank, the most recent
        call first. Ranks that have not started, and those of a node that is not connected to this
        process, are missing.

    Examples
    --------
    >>> future = TorchDistributor(2).submit(train)  # doctest: +SKIP
    >>> for run_id, stack_by_rank in distributor.stacks().items():
    ...     print(run_id, *stack_by_rank.values())  # doctest: +SKIP
    """
    with _lock:
        active = dict(_active)
    return {run_id: requests.stacks() for run_id, requests in active.items()}
