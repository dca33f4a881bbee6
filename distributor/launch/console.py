"""Ranks' output on the driver, prefixed by rank, line by line as it comes.

A `_Feed` turns one rank's bytes into whole lines and the states of progress bars, a `_MovingLine`
is the one line of a screen that is drawn over, and `Console` says what goes where, and when.
"""

from __future__ import annotations

import codecs
import io
import logging
import math
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from typing import Literal, TextIO

from distributor.wire.messages import Stream

_Put = tuple[Stream, str]

_PARTIAL_AFTER = 1.0  # s until text without a newline, a prompt say, is shown as it is
_STATE_EVERY = 0.5  # s between two states of one progress bar as lines of a file
_TICK_EVERY = 0.1  # s between two looks of `Console.write` at the other ranks
_HEADLINE_AFTER = 2.0  # s until a run is long enough for a line of its own
_HEADLINE_EVERY = 0.5  # s between two states of that line
_HEADLINE_IN_FILES = 30.0  # s between two of them as lines of a file
_LONG = 8192  # characters: a longer unfinished line is neither a prompt nor a bar
# Control sequences, colours ("m") aside, and one that is cut off.
_MOVES = re.compile(r"\x1b\[[0-?]*[ -/]*(?:[@-ln-~]|$)|\x1b$")
_logger = logging.getLogger("distributor")


class Console:
    """Shows what ranks print, as it comes, each line with its rank in front: ``[3] loss 0.2``.

    Progress bars move on a terminal and in a notebook, and become a line now and then elsewhere.
    Nothing that ranks print, and nothing that befalls the driver's streams, raises. All calls are
    to come from one thread.

    Parameters
    ----------
    shown
        Whether a rank's output is shown.
    headline
        Says how far the run is. A screen's moving line shows it while no rank's bar has that.
    reported
        Whether that is worth a line of a file now and then, and a last one.
    clock
        Seconds that only grow.
    """

    def __init__(
        self,
        shown: Callable[[int], bool],
        *,
        headline: Callable[[], str] = lambda: "",
        reported: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shown = shown
        self._headline = headline
        self._reported = reported
        self._clock = clock
        self._headline_due = clock() + _HEADLINE_AFTER
        self._headline_in_file_due = clock() + _HEADLINE_IN_FILES
        self._feeds: dict[tuple[int, Stream], _Feed] = {}
        self._moving = _MovingLine()
        self._pending: list[_Put] = []
        self._broken: dict[Stream, TextIO] = {}
        self._ticked = -math.inf

    def write(self, rank: int, stream: Stream, data: bytes) -> None:
        """Take what a rank printed, cut anywhere, and show the lines that it completes."""
        if not self._shown(rank):
            return
        feed = self._feeds.get((rank, stream))
        if feed is None:
            feed = self._feeds[rank, stream] = _Feed(rank, stream)
        now = self._clock()
        self._show(feed, feed.take(data, now), now)
        if now - self._ticked >= _TICK_EVERY:
            self.tick()
        else:
            self._flush()

    def tick(self) -> None:
        """Show what has waited for long enough; to be called a few times a second."""
        self._ticked = now = self._clock()
        for feed in self._feeds.values():
            self._show(feed, feed.overdue(now), now)
        self._show_headline(now)
        self._flush()

    def close(self) -> None:
        """Show what is left: lines without a newline, and the last state of progress bars."""
        now = self._clock()
        self._moving.headline = ""
        for _, feed in sorted(self._feeds.items()):
            self._show(feed, feed.finish(now), now)
        if self._reported():
            self._pending.append(("stderr", self._headline() + "\n"))
        self._flush()

    def _show_headline(self, now: float) -> None:
        if _screen("stderr"):
            if now >= self._headline_due:
                self._headline_due = now + _HEADLINE_EVERY
                self._moving.headline = self._headline()
        elif now >= self._headline_in_file_due and self._reported():
            self._headline_in_file_due = now + _HEADLINE_IN_FILES
            self._pending.append(("stderr", self._headline() + "\n"))

    def _show(self, feed: _Feed, lines: str, now: float) -> None:
        if _screen(feed.stream):
            self._moving.follow(feed)
        else:
            lines += feed.report(now)
        if lines:
            self._pending.append((feed.stream, lines))

    def _flush(self) -> None:
        puts, self._pending = self._moving.around(self._pending), []
        for stream, group in groupby(puts, key=itemgetter(0)):
            out: TextIO | None = getattr(sys, stream)
            if out is None or out is self._broken.get(stream):
                continue
            if not _put(out, "".join(text for _, text in group)):
                self._broken[stream] = out


class _Feed:
    """What one rank wrote to one stream: hands out whole lines and holds the unfinished one."""

    def __init__(self, rank: int, stream: Stream) -> None:
        utf8 = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        # It keeps a "\r" at the end of a chunk back until it is known whether a "\n" follows.
        self._decoder = io.IncrementalNewlineDecoder(utf8, translate=False)
        self._held: list[str] = []  # begins with "\r" where the line is a progress bar's
        self._size = 0
        self._since = 0.0
        self._cut = False  # its beginning is shown already: a newline alone adds nothing
        self._reported = ""
        self._reported_at = -math.inf
        self.stream = stream
        self.prefix = f"[{rank}] "
        self.state = ""  # of the progress bar, if the held line is one
        self.fresh = False  # the state has changed since it was shown

    def take(self, data: bytes, now: float, *, final: bool = False) -> str:
        """The lines that these bytes complete, ready to print."""
        text = self._decoder.decode(data, final)
        if "\r" in text:
            text = text.replace("\r\n", "\n")
        if self._cut and text:
            self._cut, text = False, text.removeprefix("\n")
        ended, newline, rest = text.rpartition("\n")
        lines = self._complete(ended) if newline else ""
        if rest:
            self._hold(rest, now)
        return lines

    def finish(self, now: float) -> str:
        """What is left, as if a newline had come."""
        self.take(b"", now, final=True)
        return self._complete("") if self._held else ""

    def overdue(self, now: float) -> str:
        """The held line's beginning, if its end has not come for a while."""
        if not self._held or self._bar or now - self._since < _PARTIAL_AFTER:
            return ""
        line = self._complete("")
        self._cut = True
        return line

    def report(self, now: float) -> str:
        """The bar's state as a line, where it is new and the last one was not just now."""
        if not self.fresh or not self.state or now - self._reported_at < _STATE_EVERY:
            return ""
        self.fresh, self._reported, self._reported_at = False, self.state, now
        return f"{self.prefix}{self.state}\n"

    @property
    def _bar(self) -> bool:
        return self._held[:1] == ["\r"]

    def _hold(self, text: str, now: float) -> None:
        if not self._held or self._size > _LONG:
            self._since = now
        if "\r" in text:
            _, moved, text = text.rstrip("\r").rpartition("\r")
            if moved:
                self._held.clear()
                self._size = 0
            if not self._bar:
                self._held.insert(0, "\r")
        if text:
            self._held.append(text)
            self._size += len(text)
        if self._bar and self._size <= _LONG:
            self.state, self.fresh = _state("".join(self._held)), True

    def _complete(self, ended: str) -> str:
        text = "".join((*self._held, ended))
        self._held.clear()
        self._size, self.state = 0, ""
        if "\r" in text:
            lines = [line for line in map(self._settled, text.split("\n")) if line is not None]
            if not lines:
                return ""
            text = "\n".join(lines)
        return self.prefix + text.replace("\n", "\n" + self.prefix) + "\n"

    def _settled(self, line: str) -> str | None:
        """What stays of a finished line; of a bar its last state, if that is new and not blank."""
        if "\r" not in line:
            return line
        state, reported, self._reported = _state(line), self._reported, ""
        return state if state and state != reported else None


class _MovingLine:
    """The one line of a screen that is drawn over: the bar that was updated last, or a headline."""

    def __init__(self) -> None:
        self.headline = ""
        self._feed: _Feed | None = None
        self._drawn = ""  # what is on the screen now
        self._drawn_on: Stream = "stderr"

    def follow(self, feed: _Feed) -> None:
        """Let this feed's bar be the one, if it has moved."""
        if feed.fresh and feed.state:
            self._feed = feed
        feed.fresh = False

    def around(self, puts: list[_Put]) -> list[_Put]:
        """The same, where the line is erased first, and drawn again below."""
        feed = self._feed
        stream: Stream = "stderr"
        text = self.headline if _screen(stream) else ""
        if feed and feed.state and _screen(feed.stream):
            stream, text = feed.stream, feed.prefix + feed.state
        screens = [stream for stream, _ in puts if _screen(stream)]
        if not screens and text == self._drawn:
            return puts
        puts = [*self._erase(screens[0] if screens else self._drawn_on), *puts]
        if text:
            puts += self._draw(stream, text, screens[-1] if screens else stream)
        return puts

    def _erase(self, stream: Stream) -> list[_Put]:
        width, self._drawn = len(self._drawn), ""
        match _screen(stream) if width else None:
            case "terminal":  # its stdout and its stderr are one screen
                return [(stream, "\r\x1b[K")]
            case "notebook":
                return [(self._drawn_on, "\r" + " " * width + "\r")]
        return []

    def _draw(self, stream: Stream, text: str, last: Stream) -> list[_Put]:
        terminal = _screen(stream) == "terminal"
        if not terminal and stream != last:
            return []  # a notebook begins a new output at each change of stream: draw later
        self._drawn, self._drawn_on = text, stream
        # Without wrapping, for "\r" does not lead back to the start of a bar that has wrapped.
        return [(stream, f"\x1b[?7l\r{text}\x1b[?7h" if terminal else f"\r{text}")]


def notify(message: str) -> None:
    """Tell the user something: through logging where that is set up for it, else on stderr."""
    if _logger.isEnabledFor(logging.INFO) and _logger.hasHandlers():
        _logger.info(message, stacklevel=2)
    else:
        _put(sys.stderr, message + "\n")


def warn(message: str) -> None:
    """Warn the user through logging."""
    _logger.warning(message, stacklevel=2)


def _state(line: str) -> str:
    """What a screen shows of a line once its carriage returns have moved it."""
    return _MOVES.sub("", line.rstrip("\r").rpartition("\r")[2]).rstrip()


def _screen(stream: Stream) -> Literal["terminal", "notebook"] | None:
    """What is behind a stream of the driver, if a line on it can move."""
    out = getattr(sys, stream)
    if type(out).__module__.startswith("ipykernel"):
        return "notebook"
    with suppress(Exception):  # it may be closed, None, or the user's own
        return "terminal" if out.isatty() else None
    return None


def _put(out: TextIO, text: str) -> bool:
    """Write and flush; False where the stream fails, for training is to outlive its audience."""
    with suppress(Exception):
        try:
            out.write(text)
        except UnicodeEncodeError:
            encoding = out.encoding or "ascii"
            out.write(text.encode(encoding, "backslashreplace").decode(encoding))
        out.flush()
        return True
    return False
