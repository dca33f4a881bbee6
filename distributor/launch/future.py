"""Runs in the background: `RunFuture`."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

from distributor.errors import RunCancelled
from distributor.launch.cancellation import Cancellation

T = TypeVar("T")
CANCEL_TIMEOUT = 60.0
"""Seconds that `RunFuture.cancel` waits until the run has ended."""


def start_run(
    run: Callable[[], T],
    cancellation: Cancellation,
    thread: Callable[[Callable[[], object]], threading.Thread],
) -> RunFuture[T]:
    """Start a run in the background, on a thread that `thread` creates."""
    future = RunFuture(run, cancellation)
    thread(future._follow).start()
    return future


class RunFuture(concurrent.futures.Future[T]):
    """The future result of a run, as `TorchDistributor.submit` returns it.

    It is a `concurrent.futures.Future`: ``result()`` returns the run's value or raises the run's
    error, and `concurrent.futures.wait` and ``as_completed`` accept it. In contrast to other
    futures, it can be cancelled while it runs. See
    https://docs.python.org/3/library/concurrent.futures.html#future-objects.

    Parameters
    ----------
    run : callable
        Runs the job and returns its value.
    cancellation : Cancellation
        Requests to cancel the run.

    Examples
    --------
    >>> future = TorchDistributor(2).submit(train)  # doctest: +SKIP
    >>> future.result(timeout=3600)  # doctest: +SKIP
    """

    def __init__(self, run: Callable[[], T], cancellation: Cancellation) -> None:
        super().__init__()
        self._run = run
        self._cancellation = cancellation
        self._ended = threading.Event()

    def cancel(self) -> bool:
        """Cancel the run, and wait until all of its ranks have ended (at most 60 s).

        Returns
        -------
        bool
            Whether the run was cancelled; False if it had already ended.
        """
        if not self.done():
            self._cancellation.request()
            self._ended.wait(CANCEL_TIMEOUT)
        return self.cancelled()

    def running(self) -> bool:
        """Return whether the run is active.

        Returns
        -------
        bool
            False once the run has returned, failed or been cancelled.
        """
        return not self.done()

    def _follow(self) -> None:
        """Run, and record the result. Called once, on a thread of its own."""
        try:
            value = self._run()
        except RunCancelled:
            super().cancel()
            self.set_running_or_notify_cancel()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(value)
        finally:
            self._ended.set()
