"""Messages of this package to the user, which never break into a line that a run has drawn."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from distributor.core.text import printable
from distributor.screen.screen import SCREEN

LOGGER = "distributor"
"""The logger of all messages except for those that PySpark's classes log too."""
_level = ContextVar("level", default=logging.NOTSET)


@contextmanager
def shown_from(level: int) -> Iterator[None]:
    """Show only messages of this level or above, in this thread and in runs that it starts."""
    token = _level.set(level)
    try:
        yield
    finally:
        _level.reset(token)


def notify(message: str, logger: str = LOGGER) -> None:
    """Show a message: through ``logging`` if the user has configured it, otherwise on stderr."""
    if _level.get() > logging.INFO:
        return
    message = printable(message)  # a handler's file may be in UTF-8
    log = logging.getLogger(logger)
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        SCREEN.clear_line()
        log.info(message, stacklevel=2)
    else:
        SCREEN.print_message(message)


def warn(message: str, logger: str = LOGGER) -> None:
    """Log a warning."""
    if _level.get() > logging.WARNING:
        return
    SCREEN.clear_line()
    logging.getLogger(logger).warning(printable(message), stacklevel=2)
