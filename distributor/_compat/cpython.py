"""What this package uses of CPython's standard library that is not documented."""

from __future__ import annotations

import atexit
import linecache
import multiprocessing.process
import re
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Part of the command line of the process that removes multiprocessing's shared memory.
RESOURCE_TRACKER = b"multiprocessing.resource_tracker"

_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+", re.MULTILINE)


def disable_exit_finalizers() -> None:
    """Keep every `weakref.finalize` that exists now from running at the interpreter's exit."""
    registry: Any = weakref.finalize
    for finalizer in registry._registry:
        finalizer.atexit = False


def set_multiprocessing_folder(folder: str) -> None:
    """Have multiprocessing put the sockets of this process and its children into a folder."""
    # Its own folder is removed at exit only, so one of a process that is killed would stay.
    process: Any = multiprocessing.process.current_process()
    process._config["tempdir"] = folder


def add_source_lines(filename: str, lines: Sequence[str]) -> None:
    """Show the source of a file that does not exist here to `traceback` and `inspect`."""
    # The documented linecache.lazycache refuses names in angle brackets, such as those of cells. An
    # entry without a modification time is never discarded as stale.
    linecache.cache[filename] = (sum(map(len, lines)), None, list(lines), filename)


def split_stacks(dump: str) -> list[str]:
    """Split what `faulthandler` writes into one text for each thread, without the threads' ids."""
    return [stack for stack in _THREAD.sub(r"\1", dump).strip().split("\n\n") if stack]


def stack_of(thread: threading.Thread) -> str:
    """Return where a thread is: its latest calls, as in a traceback."""
    frame = sys._current_frames().get(thread.ident or 0)
    return f"here:\n{''.join(traceback.format_stack(frame, limit=8)).rstrip()}"


def before_thread_pools_end(function: Callable[[], object]) -> None:
    """Call a function when the main thread has ended, while threads and pools still work."""
    # atexit is too late: by then pools refuse work and, since Python 3.12, no thread can start.
    import concurrent.futures.thread  # noqa: F401  its function is called after those registered later

    threading._register_atexit(function)  # type: ignore[attr-defined]


def forget_exit_handlers() -> None:
    """Release the functions that are registered with `atexit`; the last of them can call it."""
    atexit._clear()


_lock = threading.Lock()
_calls = threading.local()
_active = 0


class _OnlyOnThisThread(type):
    """Makes a category match future warnings on threads within `future_warning_ignored` only."""

    def __subclasscheck__(cls, category: type) -> bool:
        return getattr(_calls, "ignored", False) and issubclass(category, FutureWarning)


class _IgnoredWarning(FutureWarning, metaclass=_OnlyOnThisThread):
    pass


@contextmanager
def future_warning_ignored(message: str) -> Iterator[None]:
    """Ignore a `FutureWarning` that begins so (a pattern) on this thread, and on no other."""
    # The filters of `warnings` belong to the process, so `catch_warnings` would change them for
    # other threads too. This filter matches only on threads within this context manager, and the
    # last of them removes it.
    global _active
    with _lock:
        _active += 1
        # Added each time: another thread that leaves catch_warnings restores the old filters.
        warnings.filterwarnings("ignore", message=message, category=_IgnoredWarning)
    _calls.ignored = True
    try:
        yield
    finally:
        _calls.ignored = False
        with _lock:
            _active -= 1
            if not _active:
                filters: Any = warnings.filters
                for entry in [each for each in filters if each[2] is _IgnoredWarning]:
                    filters.remove(entry)
