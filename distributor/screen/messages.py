"""Messages of this package to the user, which never break into a line that a run has drawn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from distributor.core.text import printable
from distributor.screen.screen import SCREEN

LOGGER = "distributor"
"""The logger of all messages except for those that PySpark's classes log too."""
_level = ContextVar("level", default=logging.NOTSET)
_receiver: ContextVar[Callable[[str], object] | None] = ContextVar("receiver", default=None)


@contextmanager
def shown_from(level: int) -> Iterator[None]:
    """Show only messages of this level or above, in this thread and in runs that it starts."""
    token = _level.set(level)
    try:
        yield
    finally:
        _level.reset(token)


def shows_notices() -> bool:
    """Return whether messages are shown that are no warnings."""
    return _level.get() <= logging.INFO


@contextmanager
def notices_go_to(receiver: Callable[[str], object]) -> Iterator[None]:
    """Pass messages that are no warnings to a function instead of stderr, as in `shown_from`."""
    token = _receiver.set(receiver)
    try:
        yield
    finally:
        _receiver.reset(token)


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
