"""Ranks' output on the driver, prefixed by rank, line by line as it comes.

A `_Feed` turns one rank's bytes into whole lines and the states of progress bars, `_Blocks` keeps a
notebook's output in few blocks, and `Console` says what is shown, and when.
"""

from __future__ import annotations

import codecs
import io
import logging
import math
import re
import time
from collections.abc import Callable, Iterator

from distributor.launch.screen import SCREEN, Live, Put, Screen, kind
from distributor.wire.messages import Stream

_PARTIAL_AFTER = 1.0  # s until text without a newline, a prompt say, is shown on a screen
_PARTIAL_IN_FILES = 10.0  # s until it is shown elsewhere, as a line
_STATE_EVERY = 0.5  # s between two states of one progress bar as lines of a file
_TICK_EVERY = 0.1  # s between two looks of `Console.write` at the other ranks
_HEADLINE_AFTER = 2.0  # s until a run is long enough for a line of its own
_HEADLINE_EVERY = 0.5  # s between two states of that line
_HEADLINE_IN_FILES = 30.0  # s between two of them as lines of a file
_SWITCH_EVERY = 1.0, 30.0  # s between a notebook's first changes of stream, and between later ones
_LONG = 8192  # characters: a longer unfinished line is neither a prompt nor a bar
# Control sequences, colours ("m") aside, and one that is cut off.
_MOVES = re.compile(r"\x1b\[[0-?]*[ -/]*(?:[@-ln-~]|$)|\x1b$")
_logger = logging.getLogger("distributor")


class Console:
    """Shows what ranks print, as it comes, each line with its rank in front: ``[3] loss 0.2``.

    Progress bars move on a terminal and in a notebook, and become a line now and then elsewhere.
    Nothing that ranks print, and no failure of the driver's streams, raises. All calls must come
    from one thread.

    Parameters
    ----------
    shown : callable
        Whether a rank's output is shown.
    prefix : callable
        Returns what stands in front of a rank's lines at the time.
    headline : callable
        Says how far the run is. A screen's moving line shows it while no rank's bar has that.
    reported : callable
        Whether that is worth a line of a file now and then, and a last one.
    clock : callable
        Seconds that only grow.
    screen : Screen
        Where all is written.
    """

    def __init__(
        self,
        shown: Callable[[int], bool],
        *,
        prefix: Callable[[int], str] = lambda rank: f"[{rank}] ",
        headline: Callable[[], str] = lambda: "",
        reported: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        screen: Screen = SCREEN,
    ) -> None:
        self._shown = shown
        self._prefix = prefix
        self._headline = headline
        self._reported = reported
        self._clock = clock
        self._screen = screen
        self._headline_due = clock() + _HEADLINE_AFTER
        self._headline_in_file_due = clock() + _HEADLINE_IN_FILES
        self._headline_now = ""
        self._feeds: dict[tuple[int, Stream], _Feed] = {}
        self._bar: _Feed | None = None  # the feed whose bar was updated last
        self._pending: list[Put] = []
        self._blocks = _Blocks()
        self._ticked = -math.inf

    def write(self, rank: int, stream: Stream, data: bytes) -> None:
        """Take what a rank printed, cut anywhere, and show the lines that it completes."""
        if not self._shown(rank):
            return
        feed = self._feeds.get((rank, stream))
        if feed is None:
            feed = self._feeds[rank, stream] = _Feed(lambda: self._prefix(rank), stream)
        now = self._clock()
        self._show(feed, feed.take(data, now), now)
        if now - self._ticked >= _TICK_EVERY:
            self.tick()
        elif kind(stream) != "notebook":  # which is written to in few, larger pieces
            self._flush(now)

    def tick(self) -> None:
        """Show what has waited for long enough; to be called a few times a second."""
        self._ticked = now = self._clock()
        for feed in self._feeds.values():
            self._show(feed, feed.overdue(now), now)
        self._show_headline(now)
        self._flush(now)

    def close(self) -> None:
        """Show what is left: lines without a newline, and the last state of progress bars."""
        now = self._clock()
        self._headline_now = ""
        for _, feed in sorted(self._feeds.items()):
            self._show(feed, feed.finish(now), now)
        self._flush(now, last=True)
        if not self._screen.end(self, self._headline()) and self._reported():
            self._screen.say(self._headline())

    def _show_headline(self, now: float) -> None:
        if kind("stderr"):
            if now >= self._headline_due:
                self._headline_due = now + _HEADLINE_EVERY
                self._headline_now = self._headline()
        elif now >= self._headline_in_file_due and self._reported():
            self._headline_in_file_due = now + _HEADLINE_IN_FILES
            self._pending.append(Put("stderr", self._headline() + "\n"))

    def _show(self, feed: _Feed, puts: Iterator[Put], now: float) -> None:
        self._pending.extend(puts)
        if not kind(feed.stream):
            self._pending.extend(feed.report(now))
        elif feed.fresh:
            feed.fresh = False
            if feed.state:
                self._bar = feed
                if kind(feed.stream) == "notebook":
                    self._headline_due = -math.inf  # what its display shows after the bar

    def _flush(self, now: float, *, last: bool = False) -> None:
        puts, self._pending = self._pending, []
        if kind("stdout") == kind("stderr") == "notebook":
            puts = self._blocks.let_out(puts, now, last=last)
        self._screen.show(self, puts, self._live())

    def _live(self) -> Live | None:
        if self._bar and self._bar.state and kind(self._bar.stream):
            return Live(self._bar.stream, self._bar.prefix + self._bar.state, is_bar=True)
        return Live("stderr", self._headline_now) if self._headline_now else None


class _Blocks:
    """Lets text out so that the streams of a notebook take turns less and less often.

    A notebook appends to its last output as long as that is of the same stream, and begins a new
    one otherwise. What is printed to the other stream is held back for a while.
    """

    def __init__(self) -> None:
        self._held: dict[Stream, list[Put]] = {"stdout": [], "stderr": []}
        self._current: Stream = "stdout"
        self._due = -math.inf
        self._pause = _SWITCH_EVERY[0]

    def let_out(self, puts: list[Put], now: float, *, last: bool) -> list[Put]:
        """Take text, and return what is to be written now."""
        for put in puts:
            self._held[put.stream].append(put)
        out = self._take(self._current)
        other: Stream = "stderr" if self._current == "stdout" else "stdout"
        if self._held[other] and (last or now >= self._due):
            out += self._take(other)
            self._current, self._due = other, now + self._pause
            self._pause = min(2 * self._pause, _SWITCH_EVERY[1])
        return out

    def _take(self, stream: Stream) -> list[Put]:
        puts, self._held[stream] = self._held[stream], []
        return puts


class _Feed:
    """What one rank wrote to one stream: hands out whole lines and holds the unfinished one."""

    def __init__(self, prefix: Callable[[], str], stream: Stream) -> None:
        utf8 = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        # It keeps a "\r" at the end of a chunk back until it is known whether a "\n" follows.
        self._decoder = io.IncrementalNewlineDecoder(utf8, translate=False)
        self._held: list[str] = []  # begins with "\r" where the line is a progress bar's
        self._size = 0
        self._since = 0.0
        self._begun = False  # its beginning is shown already
        self._reported = ""
        self._reported_at = -math.inf
        self._prefix = prefix
        self.stream = stream
        self.state = ""  # of the progress bar, if the held line is one
        self.fresh = False  # the state has changed since it was shown

    @property
    def prefix(self) -> str:
        """What stands in front of each line."""
        return self._prefix()

    def take(self, data: bytes, now: float, *, final: bool = False) -> Iterator[Put]:
        """Take bytes, and return the lines that they complete."""
        text = self._decoder.decode(data, final)
        if "\r" in text:
            text = text.replace("\r\n", "\n")
        ended, newline, rest = text.rpartition("\n")
        lines = self._complete(ended) if newline else iter(())
        if rest:
            self._hold(rest, now)
        return lines

    def finish(self, now: float) -> Iterator[Put]:
        """Return what is left, as if a newline had come."""
        self.take(b"", now, final=True)
        return self._complete("") if self._held or self._begun else iter(())

    def overdue(self, now: float) -> Iterator[Put]:
        """Return the held line's beginning, if its end has not come for a while."""
        on_screen = kind(self.stream) is not None
        patience = _PARTIAL_AFTER if on_screen else _PARTIAL_IN_FILES
        if not self._held or self._bar or now - self._since < patience:
            return iter(())
        text = self._take_held()
        begun, self._begun = self._begun, True
        return iter([self._part(text if on_screen else f"{text}\n", begun)])

    def report(self, now: float) -> Iterator[Put]:
        """Return the bar's state as a line, if it is new and the last one was not just now."""
        if self.fresh and self.state and now - self._reported_at >= _STATE_EVERY:
            self.fresh, self._reported, self._reported_at = False, self.state, now
            yield Put(self.stream, f"{self.prefix}{self.state}\n")

    @property
    def _bar(self) -> bool:
        return self._held[:1] == ["\r"]

    def _part(self, text: str, begun: bool) -> Put:
        return Put(self.stream, text, self, self.prefix, begun)

    def _take_held(self) -> str:
        text = "".join(self._held)
        self._held.clear()
        self._size, self.state = 0, ""
        return text

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

    def _complete(self, ended: str) -> Iterator[Put]:
        lines = self._take_held() + ended
        begun, self._begun = self._begun, False
        return self._completed(lines, begun)

    def _completed(self, text: str, begun: bool) -> Iterator[Put]:
        if begun and "\r" not in text.partition("\n")[0]:
            first, newline, text = text.partition("\n")
            yield self._part(f"{first}\n", True)
            if not newline:
                return
        if "\r" in text:
            lines = [line for line in map(self._settled, text.split("\n")) if line is not None]
            if not lines:
                return
            text = "\n".join(lines)
        yield Put(self.stream, self.prefix + text.replace("\n", "\n" + self.prefix) + "\n")

    def _settled(self, line: str) -> str | None:
        """What stays of a finished line; of a bar its last state, if that is new and not blank."""
        if "\r" not in line:
            return line
        state, reported, self._reported = _state(line), self._reported, ""
        return state if state and state != reported else None


def notify(message: str) -> None:
    """Tell the user something: through logging if that is set up for it, else on stderr."""
    if _logger.isEnabledFor(logging.INFO) and _logger.hasHandlers():
        SCREEN.make_way()
        _logger.info(message, stacklevel=2)
    else:
        SCREEN.say(message)


def warn(message: str) -> None:
    """Warn the user through logging."""
    SCREEN.make_way()
    _logger.warning(message, stacklevel=2)


def _state(line: str) -> str:
    """What a screen shows of a line once its carriage returns have moved it."""
    return _MOVES.sub("", line.rstrip("\r").rpartition("\r")[2]).rstrip()
