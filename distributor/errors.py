"""The errors that the launcher itself raises; a rank's own exception is raised unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class DistributorError(RuntimeError):
    """Base of every error that `distributor` raises of its own accord."""


class RemoteTraceback(Exception):
    """The text of a remote traceback, hung below a rank's exception as its cause."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return "\n" + self.text


class RemoteError(DistributorError):
    """A rank raised an exception that cannot be rebuilt on the driver; its whole text is here."""


class UnpicklableError(DistributorError, TypeError):
    """A function, an argument or a returned value cannot be pickled."""


class WorkerDied(DistributorError):
    """A rank ended without recording an outcome: killed, crashed, or left with an exit code.

    Parameters
    ----------
    message : str
        What happened, where, and the last lines that the rank printed.
    exit_code : int, optional
        The exit code, where the rank exited by itself.
    signal : int, optional
        The number of the signal, where one ended the rank.
    """

    def __init__(
        self, message: str, *, exit_code: int | None = None, signal: int | None = None
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.signal = signal

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"exit_code": self.exit_code, "signal": self.signal}
        return type(self), self.args, state


class _Timeout(DistributorError, TimeoutError):
    """A deadline passed.

    Parameters
    ----------
    message : str
        Which deadline, who was waited for, and where those at work stood.
    stacks : mapping of int to str, optional
        Where they stood, by rank: Python stacks.
    """

    def __init__(self, message: str, *, stacks: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.stacks = dict(stacks or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, {"stacks": self.stacks}


class StartTimeout(_Timeout):
    """Not all ranks were up within ``start_timeout`` seconds."""


class RunTimeout(_Timeout):
    """The run took longer than ``timeout`` seconds."""


class RunCancelled(DistributorError):
    """The run was ended by who started it."""


class NodeLost(DistributorError):
    """A node was no longer heard of: cut off, stopped, or its machine dead.

    Parameters
    ----------
    message : str
        Which, and what is known of it.
    silent : tuple of str
        The hosts that only stopped answering, so that Spark may still count on them.
    """

    def __init__(self, message: str, *, silent: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.silent = silent

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, {"silent": self.silent}


class ValueTooLarge(DistributorError):
    """A rank's value could not be brought to the driver; the message says where it is kept."""


class ExecutorNotReady(DistributorError):
    """A node lacks what a rank needs: the same Python, torch, pyarrow, its ``environment``."""
