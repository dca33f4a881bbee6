"""Messages of this package to the user, which never break into a line that a run has drawn."""

from __future__ import annotations

import logging

from distributor.launch.output.screen import SCREEN

_logger = logging.getLogger("distributor")


def notify(message: str) -> None:
    """Show a message: through ``logging`` if the user has configured it, otherwise on stderr."""
    if _logger.isEnabledFor(logging.INFO) and _logger.hasHandlers():
        SCREEN.clear_line()
        _logger.info(message, stacklevel=2)
    else:
        SCREEN.print_message(message)


def warn(message: str) -> None:
    """Log a warning."""
    SCREEN.clear_line()
    _logger.warning(message, stacklevel=2)
