"""One rank's output on one stream, reassembled into lines and progress-bar states."""

from __future__ import annotations

import codecs
import io
import math
import re
from collections.abc import Callable, Iterator

from distributor.screen.screen import Put, kind
from distributor.wire.messages import Stream

_PARTIAL_LINE_DELAY = 1.0  # s until unterminated text, such as a prompt, is shown on a screen
_PARTIAL_LINE_DELAY_IN_FILES = 10.0  # s until it is shown elsewhere, as a line
_BAR_INTERVAL_IN_FILES = 0.5  # s between two states of one progress bar as lines of a file
_MAX_HELD = 8192  # characters; a longer unterminated line is neither a prompt nor a progress bar
# Control sequences except colors ("m"), and a sequence that is cut off.
_CURSOR_MOVES = re.compile(r"\x1b\[[0-?]*[ -/]*(?:[@-ln-~]|$)|\x1b$")


class LineBuffer:
    """Turns the bytes that one rank writes to one stream into whole lines.

    It holds back the unterminated line, and keeps the state of a progress bar, which is a line that
    is rewritten after a carriage return.

    Parameters
    ----------
    prefix : callable
        Returns the current prefix of the rank's lines.
    stream : "stdout" or "stderr"
        The stream.
    """

    def __init__(self, prefix: Callable[[], str], stream: Stream) -> None:
        utf8 = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        # It holds back a "\r" at the end of a chunk until it is known whether a "\n" follows.
        self._decoder = io.IncrementalNewlineDecoder(utf8, translate=False)
        self._held: list[str] = []  # starts with "\r" if the line is a progress bar
        self._size = 0
        self._since = 0.0
        self._partly_shown = False
        self._reported = ""
        self._reported_at = -math.inf
        self._prefix = prefix
        self.stream = stream
        self.state = ""  # of the progress bar, if the held line is one
        self.has_new_state = False  # the state has changed since it was shown

    @property
    def prefix(self) -> str:
        """The prefix of each line."""
        return self._prefix()

    def feed(self, data: bytes, now: float, *, final: bool = False) -> Iterator[Put]:
        """Add bytes, and return the lines that they complete."""
        text = self._decoder.decode(data, final)
        if "\r" in text:
            text = text.replace("\r\n", "\n")
        ended, newline, rest = text.rpartition("\n")
        lines = self._complete(ended) if newline else iter(())
        if rest:
            self._hold(rest, now)
        return lines

    def finish(self, now: float) -> Iterator[Put]:
        """Return the remaining text as if it were terminated."""
        self.feed(b"", now, final=True)
        return self._complete("") if self._held or self._partly_shown else iter(())

    def overdue(self, now: float) -> Iterator[Put]:
        """Return the start of the held line if its end has not arrived for some time."""
        if not self._held or self._is_bar:
            return iter(())
        on_screen = kind(self.stream) is not None
        delay = _PARTIAL_LINE_DELAY if on_screen else _PARTIAL_LINE_DELAY_IN_FILES
        if now - self._since < delay:
            return iter(())
        text = self._take_held()
        partly_shown, self._partly_shown = self._partly_shown, True
        return iter([self._part(text if on_screen else f"{text}\n", partly_shown)])

    def bar_as_line(self, now: float) -> Iterator[Put]:
        """Return a new state of the progress bar as a line, at a limited rate."""
        is_due = now - self._reported_at >= _BAR_INTERVAL_IN_FILES
        if self.has_new_state and self.state and is_due:
            self.has_new_state, self._reported, self._reported_at = False, self.state, now
            yield Put(self.stream, f"{self.prefix}{self.state}\n")

    @property
    def _is_bar(self) -> bool:
        return self._held[:1] == ["\r"]

    def _part(self, text: str, partly_shown: bool) -> Put:
        return Put(self.stream, text, self, self.prefix, partly_shown)

    def _take_held(self) -> str:
        text = "".join(self._held)
        self._held.clear()
        self._size, self.state = 0, ""
        return text

    def _hold(self, text: str, now: float) -> None:
        if not self._held or self._size > _MAX_HELD:
            self._since = now
        if "\r" in text:
            _, returned, text = text.rstrip("\r").rpartition("\r")
            if returned:
                self._held.clear()
                self._size = 0
            if not self._is_bar:
                self._held.insert(0, "\r")
        if text:
            self._held.append(text)
            self._size += len(text)
        if self._is_bar and self._size <= _MAX_HELD:
            self.state, self.has_new_state = _visible("".join(self._held)), True

    def _complete(self, ended: str) -> Iterator[Put]:
        lines = self._take_held() + ended
        partly_shown, self._partly_shown = self._partly_shown, False
        return self._completed(lines, partly_shown)

    def _completed(self, text: str, partly_shown: bool) -> Iterator[Put]:
        if partly_shown and "\r" not in text.partition("\n")[0]:
            first, newline, text = text.partition("\n")
            yield self._part(f"{first}\n", True)
            if not newline:
                return
        if "\r" in text:
            lines = [line for line in map(self._final, text.split("\n")) if line is not None]
            if not lines:
                return
            text = "\n".join(lines)
        yield Put(self.stream, self.prefix + text.replace("\n", "\n" + self.prefix) + "\n")

    def _final(self, line: str) -> str | None:
        """Return the final text of a line; None for a bar's last state that is blank or shown."""
        if "\r" not in line:
            return line
        state, reported, self._reported = _visible(line), self._reported, ""
        return state if state and state != reported else None


def _visible(line: str) -> str:
    """Return what a screen shows of a line after its carriage returns."""
    return _CURSOR_MOVES.sub("", line.rstrip("\r").rpartition("\r")[2]).rstrip()
