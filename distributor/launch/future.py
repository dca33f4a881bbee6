"""Runs that go on while their caller does something else."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

from distributor.errors import RunCancelled
from distributor.launch.cancellation import Cancellation

T = TypeVar("T")
END_SECONDS = 60.0
"""Seconds that `RunFuture.cancel` waits until the run has ended."""


class RunFuture(concurrent.futures.Future[T]):
    """What a run gives, once it has ended.

    ``result()`` gives its value or raises what the run raised, and `concurrent.futures.wait` and
    the like take it. Unlike other futures it can be cancelled while it runs.
    """

    def __init__(self, run: Callable[[], T], cancellation: Cancellation) -> None:
        super().__init__()
        self._run = run
        self._cancellation = cancellation
        self._ended = threading.Event()

    def cancel(self) -> bool:
        """End the run, and wait until none of its ranks is left.

        Returns
        -------
        bool
            Whether it was cancelled; False where it had ended by itself.
        """
        if not self.done():
            self._cancellation.request()
            self._ended.wait(END_SECONDS)
        return self.cancelled()

    def running(self) -> bool:
        """Tell whether the run goes on."""
        return not self.done()

    def follow(self) -> None:
        """Run, and keep what comes of it; to be called once, on a thread of its own."""
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
