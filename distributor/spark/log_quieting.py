"""Silences what Spark and PySpark show about a run while it lasts.

Spark's progress bar would overwrite the line on which messages begin.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from distributor._compat.cpython import future_warning_ignored
from distributor._compat.pyspark import PANDAS_WARNING, progress_bar

BAR_SECONDS = 0.2
"""Seconds between two removals of Spark's progress bar: each job that ends lets it return."""
HIDDEN_SECONDS = 30.0
"""Seconds that Spark's progress bar stays away if this process is too busy to remove it again."""


@contextmanager
def no_progress_bar(session: Any) -> Iterator[None]:
    """Hide Spark's progress bar again and again: it cannot be switched off while Spark runs."""
    bar = None
    with suppress(Exception):  # another version of Spark may draw it in another way
        bar = None if session.is_connect else progress_bar(session.spark.sparkContext)
    if bar is None:
        yield
        return
    ended = threading.Event()

    def hide() -> None:
        with suppress(Exception):  # Spark may have stopped
            while not ended.wait(BAR_SECONDS):
                bar.hide(HIDDEN_SECONDS)

    bar.hide(HIDDEN_SECONDS)
    thread = threading.Thread(target=hide, name="spark-progress-bar", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(Exception):
            bar.show()


def no_warning() -> AbstractContextManager[None]:
    """Ignore the warning that PySpark issues for a call in this context, on this thread alone."""
    return future_warning_ignored(PANDAS_WARNING)
