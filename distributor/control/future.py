"""Runs in the background: `RunFuture`."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import sys
import threading
import traceback
from typing import Any, TypeVar

from distributor._compat.cpython import before_thread_pools_end
from distributor.control.attempts import execute
from distributor.control.run import Run
from distributor.core.cell_errors import ends_at_caller
from distributor.core.text import counted, table_of
from distributor.errors import RunCancelled
from distributor.policies import FailedAttempt
from distributor.report.runs import Page
from distributor.screen.messages import notify
from distributor.screen.screen import kind

T = TypeVar("T")
CANCEL_TIMEOUT = 60.0
"""Seconds that `RunFuture.cancel` waits until the run has ended."""


def start_run(run: Run) -> RunFuture[Any]:
    """Start a run in the background, on a thread of its launcher.

    The exit of the interpreter waits for the run, except for that of a notebook's kernel, which is
    shut down to end what runs in it.
    """
    future: RunFuture[Any] = RunFuture(run)
    if kind("stdout") != "notebook":
        _wait_at_exit()
        _open_runs.add(future)
    run.launcher.thread(future._follow).start()
    return future


class RunFuture(concurrent.futures.Future[T]):
    """The future result of a run, as `TorchDistributor.submit` returns it.

    It is a `concurrent.futures.Future`: ``result()`` returns the run's value or raises the run's
    error, and `concurrent.futures.wait` and ``as_completed`` accept it. In contrast to other
    futures, it can be cancelled while it runs. See
    https://docs.python.org/3/library/concurrent.futures.html#future-objects.

    Parameters
    ----------
    run : Run
        The job's run.

    Examples
    --------
    >>> future = TorchDistributor(2).submit(train)  # doctest: +SKIP
    >>> future.result(timeout=3600)  # doctest: +SKIP
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run
        self._name = run.spec.program.name
        self._ended = threading.Event()

    def __repr__(self) -> str:
        return f"<RunFuture of {self._name}: {self._state_text()}>"

    def _repr_html_(self) -> str:
        return table_of("RunFuture", {"run": self._name, "state": self._state_text()})

    def _state_text(self) -> str:
        if not self.done():
            return "running"
        if self.cancelled():
            return "cancelled"
        error = super().exception()
        return "finished" if error is None else f"failed with {type(error).__name__}"

    @property
    def attempts(self) -> tuple[FailedAttempt, ...]:
        """The attempts that have failed so far: the first and the latest nine, with their errors.

        An error's ``rank_failures`` maps each failed rank to its host and traceback.
        """
        return tuple(self._run.failed.kept)

    def save_page(self, path: str | os.PathLike[str] | None = None) -> Page:
        """Save the page of this run, also while it lasts.

        Parameters
        ----------
        path : str or path, optional
            The file, as in `distributor.save_page`.

        Returns
        -------
        Page
            The page, which a notebook shows.

        Raises
        ------
        ValueError
            If the run has no event log, because ``event_log`` is off.
        OSError
            If the page cannot be written.

        Examples
        --------
        >>> future.save_page("report.html")  # doctest: +SKIP
        """
        return self._run.events.save_page(path)

    def cancel(self) -> bool:
        """Cancel the run, and wait until all of its ranks have ended (at most 60 s).

        Returns
        -------
        bool
            Whether the run was cancelled; False if it had already ended.
        """
        if not self.done():
            self._run.cancellation.request()
            self._ended.wait(CANCEL_TIMEOUT)
        return self.cancelled()

    @ends_at_caller
    def result(self, timeout: float | None = None) -> T:
        """Return the run's value, once it has ended.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; by default there is no limit.

        Returns
        -------
        object
            The value.

        Raises
        ------
        Exception
            The run's error.
        TimeoutError
            If the run is still active after `timeout`.
        concurrent.futures.CancelledError
            If the run was cancelled.
        """
        self.exception(timeout)  # a collected error is not shown at the interpreter's exit
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the run's error, once it has ended.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; by default there is no limit.

        Returns
        -------
        BaseException or None
            The error; None if the run has returned a value.

        Raises
        ------
        TimeoutError
            If the run is still active after `timeout`.
        concurrent.futures.CancelledError
            If the run was cancelled.
        """
        try:
            error = super().exception(timeout)
        except KeyboardInterrupt as interrupt:
            interrupt.args = (f"the run of {self._name} goes on; cancel() ends it",)
            raise
        _open_runs.discard(self)
        return error

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
            value = execute(self._run)
        except RunCancelled:
            super().cancel()
            self.set_running_or_notify_cancel()
            _open_runs.discard(self)
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(value)
            _open_runs.discard(self)
        finally:
            self._ended.set()


_open_runs: set[RunFuture[Any]] = set()
"""The runs of this process that are active, or that have failed and whose errors nobody has
collected. A forked process has none. Iterate over a copy: runs that end are removed meanwhile."""
os.register_at_fork(after_in_child=_open_runs.clear)


@functools.cache
def _wait_at_exit() -> None:
    before_thread_pools_end(_await_open_runs)


def _await_open_runs() -> None:
    """Wait for the active runs, and show the errors that nobody has collected."""
    active: list[RunFuture[Any]] = []
    try:
        # Threads of the script may start further runs in the meantime.
        while active := [future for future in _open_runs.copy() if not future.done()]:
            names = ", ".join(future._name for future in active)
            notify(f"Waiting for {counted(len(active), 'run')} ({names}). Ctrl-C cancels.")
            concurrent.futures.wait(active)
    except KeyboardInterrupt:
        for future in active:
            future._run.cancellation.request()  # all of them, before the wait for the first
        for future in active:
            future.cancel()
        raise
    finally:
        for future in _open_runs.copy():
            if future.done() and not future.cancelled() and (error := future.exception()):
                print(f"The run of {future._name} failed:", file=sys.stderr)
                traceback.print_exception(error)
