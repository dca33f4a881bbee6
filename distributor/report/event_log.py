"""The event log of a run: lines of JSON, written by the driver while the run lasts.

`docs/reference/event-log.md` has its schema. Each line has the time (``at``, seconds since the
epoch) and the kind (``event``); the first line is a ``run``.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import queue
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distributor.core.files import for_this_user, lock_exclusively, private_folder, try_lock
from distributor.core.text import Redaction
from distributor.errors import LogError
from distributor.screen.messages import warn

VERSION = 1
"""The version of the schema. New kinds of events and new fields do not change it."""
MAX_RUNS, MAX_BYTES = 200, 500e6
"""Logs that the folder of runs may have, and their bytes; the oldest are removed."""
MAX_WAITING = 10_000
"""Events that may wait for a slow disk, beyond which the next are dropped."""
END_SECONDS = 5.0
"""Seconds that the end of a run waits for a slow disk."""
LOCK_SECONDS = 1.0
"""Seconds that the lock of a new log is waited for."""
TAIL_BYTES = 2**20
"""Bytes at the end of a log that certainly have its last event."""
SUFFIX = ".jsonl"
SECONDS_OF_ID = len("20261130-081025")
"""The part of a run's id that has the second in which it began."""

Event = Mapping[str, Any]


def runs_folder() -> Path:
    """Return the folder of this user's logs: in the temporary one for a user without a home."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    if state.startswith("~"):
        state = os.path.join(tempfile.gettempdir(), f"distributor-{os.getuid()}")
    return Path(state, "distributor", "runs").absolute()


class EventLog:
    """Writes the events of a run on a thread of its own, so that a slow disk delays nothing.

    A log that cannot be written does not end the run: the user is warned once. While it is being
    written, its file is locked.

    Parameters
    ----------
    run_id : str
        The run's id.
    logs : Path or None
        The folder of the ranks' output: the log is in it, and the folder of runs has a link.
    env : mapping of str to str
        Variables whose secrets are left out.
    """

    def __init__(self, run_id: str, logs: Path | None, env: Mapping[str, str]) -> None:
        self._link = runs_folder() / f"{run_id}{SUFFIX}"
        self.path = self._link if logs is None else logs / f"events{SUFFIX}"
        escaped = {f"{name} in JSON": json.dumps(value)[1:-1] for name, value in env.items()}
        self._redaction = Redaction({**env, **escaped})
        self._events: queue.SimpleQueue[Event | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="event-log", daemon=True)
        self._has_warned = self._is_cut = False

    def __enter__(self) -> EventLog:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._events.put(None)
        self._thread.join(END_SECONDS)

    def add(self, event: Event) -> None:
        """Write an event soon."""
        if self._events.qsize() < MAX_WAITING:
            self._events.put(event)

    def flush(self) -> None:
        """Wait until the events so far are written, or the disk has been slow for too long."""
        if self._thread.is_alive():
            written = threading.Event()
            self._events.put(written)
            written.wait(END_SECONDS)

    def _write_all(self) -> None:
        file = None
        with contextlib.ExitStack() as opened:
            while (event := self._events.get()) is not None:
                if isinstance(event, threading.Event):
                    event.set()
                    continue
                try:
                    file = file or opened.enter_context(self._open())
                    self._write(file, self._line(event))
                except Exception as error:
                    self._warn(error)

    def _open(self) -> Any:
        if self.path == self._link:
            self._prepare_folder()
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        file = open(self.path, "ab", buffering=0, opener=for_this_user)
        if self.path != self._link:
            with contextlib.suppress(OSError):  # the log is elsewhere
                self._prepare_folder()
                self._link.symlink_to(self.path.absolute())
        with contextlib.suppress(OSError):  # a reader looks now, or the disk has no locks
            lock_exclusively(file.fileno(), LOCK_SECONDS, "")
        return file

    def _prepare_folder(self) -> None:
        folder = self._link.parent
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_oldest(private_folder(folder))

    def _line(self, event: Event) -> bytes:
        text = json.dumps(event, separators=(",", ":"), default=_plain, ensure_ascii=False)
        return self._redaction.of_text(text).encode(errors="backslashreplace") + b"\n"

    def _write(self, file: Any, line: bytes) -> None:
        data = b"\n" + line if self._is_cut else line
        self._is_cut = True
        while data:
            data = data[file.write(data) :]
        self._is_cut = False

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(f"The event log {self.path} cannot be written, but the run goes on: {error}")


def _plain(value: Any) -> Any:
    """Return what JSON can represent; what takes time is called on this thread."""
    return value() if callable(value) else str(value)


def user_name() -> str:
    """Return the name of this user, or the number if there is no name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def remove_oldest(folder: Path, max_runs: int = MAX_RUNS, max_bytes: float = MAX_BYTES) -> None:
    """Remove the oldest logs of a folder, so that there is room for another one.

    Logs that are being written stay. Of a log in a ``log_dir``, the link is removed.
    """
    num_bytes = 0.0
    for number, path in enumerate(logs_in(folder), start=1):
        with contextlib.suppress(OSError):
            num_bytes += path.lstat().st_size
            if (number >= max_runs or num_bytes > max_bytes) and not is_being_written(path):
                path.unlink()


def logs_in(folder: Path) -> list[Path]:
    """Return the event logs of a folder, the latest first."""
    return sorted(folder.glob(f"*{SUFFIX}"), key=_begun, reverse=True)


def _begun(log: Path) -> tuple[str, int]:
    """Return a key by which logs are in the order in which their runs began."""
    with contextlib.suppress(OSError):  # it has just been removed
        return log.stem[:SECONDS_OF_ID], log.lstat().st_mtime_ns
    return log.stem[:SECONDS_OF_ID], 0


def is_being_written(path: Path) -> bool:
    """Return whether the driver of a log's run is still there."""
    for mode in ("r+b", "rb"):  # network file systems lock only what may be written
        with contextlib.suppress(OSError), path.open(mode) as file:
            return not try_lock(file.fileno())
    return path.exists()


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a log. Lines that are not complete are left out."""
    try:
        with path.open("rb") as file:
            first = True
            for line in file:
                if (event := _parsed(line)) is None:
                    continue
                if first and event.get("event") != "run":
                    break
                if event.get("version", VERSION) > VERSION:
                    raise LogError(
                        f"{path} has version {event['version']} of the event log, and this version "
                        f"of distributor reads version {VERSION}: use a newer one."
                    )
                first = False
                yield event
            if first:
                raise LogError(f"{path} is not the event log of a run, or has no line yet.")
    except OSError as error:
        raise LogError(f"{path} cannot be read: {error.strerror or error}.") from None


def read_ends(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the first and the last event of a log."""
    first = next(read_log(path))
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        events = [event for line in file if (event := _parsed(line))]
    return first, events[-1] if events else first


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "at" in event and line.endswith(b"\n") else None
