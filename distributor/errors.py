"""The errors that this package raises. A rank's own exception is raised unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class DistributorError(RuntimeError):
    """Base class of the errors that `distributor` raises itself.

    Examples
    --------
    >>> try:
    ...     TorchDistributor(2).run(train)
    ... except DistributorError as error:
    ...     print("not an exception of train:", error)  # doctest: +SKIP
    """


class RemoteTraceback(Exception):
    """The text of a remote traceback, as the cause of a rank's exception.

    Parameters
    ----------
    text : str
        The traceback.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return "\n" + self.text


class RemoteError(DistributorError):
    """A rank's exception could not be rebuilt on the driver. The message has its full text."""


class UnpicklableError(DistributorError, TypeError):
    """A function, an argument or a returned value cannot be pickled; the message names it."""


class LogError(DistributorError, ValueError):
    """There is no such event log of a run, or it cannot be read."""


class WorkerDied(DistributorError):
    """A rank ended without a value or exception: it was killed, crashed, or exited.

    Parameters
    ----------
    message : str
        What happened, on which host, and the last lines that the rank printed.
    exit_code : int, optional
        The exit code, if the rank exited.
    signal : int, optional
        The number of the signal, if one killed the rank.
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
    def __init__(self, message: str, *, stacks: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.stacks = dict(stacks or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, {"stacks": self.stacks}


class StartTimeout(_Timeout):
    """Not all ranks started within ``start_timeout`` seconds.

    Parameters
    ----------
    message : str
        The limit, the missing ranks or nodes, and the stacks of the ranks that are running.
    stacks : mapping of int to str, optional
        The Python stacks of the ranks that are running, by rank.
    """


class RunTimeout(_Timeout):
    """The run took longer than ``timeout`` seconds.

    Parameters
    ----------
    message : str
        The limit, the ranks that had not ended, and their stacks.
    stacks : mapping of int to str, optional
        The Python stacks of the ranks that were running, by rank.
    """


class RunStalled(_Timeout):
    """No rank printed, reported, or used its CPU or GPU for ``stall_timeout`` seconds.

    Parameters
    ----------
    message : str
        The limit, the place of each rank in the user's code, and the stacks of the ranks.
    stacks : mapping of int to str, optional
        The Python stacks of the ranks, by rank.
    """


class RunCancelled(DistributorError):
    """The run was cancelled by the process that started it."""


class OtherRankFailed(DistributorError):
    """A rank cannot go on because another one has failed, whose exception is the cause."""


class NodeLost(DistributorError):
    """A node stopped answering, or Spark reported that its executor died.

    Parameters
    ----------
    message : str
        The node, and what is known about it.
    silent : tuple of str
        Hosts that only stopped answering, so that Spark may still consider them alive.
    reclaimed : tuple of str
        Hosts on which the cluster manager took a container back for another application.
    """

    def __init__(
        self, message: str, *, silent: tuple[str, ...] = (), reclaimed: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.silent = silent
        self.reclaimed = reclaimed

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, {"silent": self.silent, "reclaimed": self.reclaimed}


class ValueTooLarge(DistributorError):
    """A rank's value could not be sent to the driver. The message names the file that has it.

    See Also
    --------
    load_value : reads the value from there.
    """


class ExecutorNotReady(DistributorError):
    """A node lacks something that ranks need: the driver's Python, torch, pyarrow, an environment.

    The message names the node, what was found there, and what to set.
    """


class ApplicationEnded(DistributorError):
    """The Spark application has ended, so that its session can run nothing more.

    The message says who ended it, as far as Spark or the cluster manager reports it.
    """
