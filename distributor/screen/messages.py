"""Messages of this package to the user, which never break into a line that a run has drawn."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TypeVar

from distributor.core.text import printable
from distributor.core.versions import listed
from distributor.screen.screen import SCREEN
from distributor.source import own_spec, state_of
from distributor.wire.messages import NodeWarning

V = TypeVar("V")
_shown: set[tuple[str, str]] = set()
"""Hosts and texts that were shown. They usually hold for the next run too and are not repeated."""


_AT_IMPORT = state_of(own_spec())


@functools.lru_cache(maxsize=1000)
def warn_once(message: str) -> None:
    """Show a warning that holds for this run and the next ones, once."""
    warn(message)


def warn_about_nodes(warnings: Mapping[str, Iterable[NodeWarning]]) -> None:
    """Show the warnings that are new, each text once with all of its hosts."""
    new: dict[str, dict[str, str]] = {}
    for host, of_host in warnings.items():
        for warning in of_host:
            if (host, warning.text) not in _shown:
                new.setdefault(warning.text, {}).setdefault(host, warning.detail)
    for text, details in new.items():
        _shown.update((host, text) for host in details)
        detail = next(iter(details.values()))
        warn(f"On {listed(details)}: {text}{f' ({detail})' if detail else ''}")


def warn_if_source_changed() -> None:
    """Warn, once, if ranks are about to import other source than this process did."""
    spec = own_spec()
    if state_of(spec) != _AT_IMPORT:
        where = next(iter(spec.submodule_search_locations or ()), "") if spec else ""
        warn_once(
            f"distributor in {where} has changed since this process imported it: ranks run the "
            "new source, and this process the old one. Restart Python."
        )


_lock = threading.Lock()
_active: list[RunLabel] = []


class RunLabel:
    """A run's label among the active runs; a context manager.

    The label is the program's name, with a number if another active run has the same name:
    ``train`` and ``train#2``. A run that never overlapped with another one is shown without it.

    Parameters
    ----------
    name : str
        The program's name.
    is_needed : bool
        Whether it is shown although no other run is active.
    """

    def __init__(self, name: str, *, is_needed: bool = False) -> None:
        self.name = name
        self._is_needed = is_needed

    def __enter__(self) -> RunLabel:
        with _lock:
            taken = {label.name for label in _active}
            number, name = 1, self.name
            while self.name in taken:
                number += 1
                self.name = f"{name}#{number}"
            _active.append(self)
            if len(_active) > 1:
                for label in _active:
                    label._is_needed = True
        return self

    def __exit__(self, *exc_info: object) -> None:
        with _lock:
            _active.remove(self)

    def prefix(self, rank: int, num_ranks: int) -> str:
        """Return the prefix of a rank's lines: ``[3] ``, or ``[train 3] ``.

        All ranks' prefixes have the same length.
        """
        label = f"[{self.name} {rank}]" if self._is_needed else f"[{rank}]"
        return label + " " * (1 + len(str(num_ranks - 1)) - len(str(rank)))

    def message(self, text: str) -> str:
        """Return a message about the run, which starts with the label if it is needed."""
        return f"[{self.name}] {text}" if self._is_needed else text


LOGGER = "distributor"
"""The logger of all messages except for those that PySpark's classes log too."""
_level = ContextVar("level", default=logging.NOTSET)
_receiver: ContextVar[Callable[[str], object] | None] = ContextVar("receiver", default=None)


@contextmanager
def _having(variable: ContextVar[V], value: V) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def shown_from(level: int) -> AbstractContextManager[None]:
    """Show only messages of this level or above, in this thread and in runs that it starts."""
    return _having(_level, level)


def shows_notices() -> bool:
    """Return whether messages are shown that are no warnings."""
    return _level.get() <= logging.INFO


def notices_go_to(receiver: Callable[[str], object]) -> AbstractContextManager[None]:
    """Pass messages that are no warnings to a function instead of stderr, as in `shown_from`."""
    return _having(_receiver, receiver)


def notify(message: str, logger: str = LOGGER) -> None:
    """Show a message: through ``logging`` if the user has configured it, otherwise on stderr."""
    if not shows_notices():
        return
    message = printable(message)  # a handler's file may be in UTF-8
    log = logging.getLogger(logger)
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        SCREEN.clear_line()
        log.info(message, stacklevel=2)
    elif receiver := _receiver.get():
        receiver(message)
    else:
        SCREEN.print_message(message)


def warn(message: str, logger: str = LOGGER) -> None:
    """Log a warning."""
    if _level.get() > logging.WARNING:
        return
    SCREEN.clear_line()
    logging.getLogger(logger).warning(printable(message), stacklevel=2)
