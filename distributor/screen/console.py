"""The ranks' output on the driver: line by line as it arrives, each line with its rank.

`LineBuffer` reassembles the lines, `_NotebookBlocks` keeps a notebook's output in few blocks, and
`Console` decides what is shown, and when.
"""

from __future__ import annotations

import codecs
import io
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from distributor.screen.screen import SCREEN, Live, Put, Screen, colored, kind
from distributor.wire.messages import Stream

_PARTIAL_LINE_DELAY = 1.0  # s until unterminated text, such as a prompt, is shown on a screen
_PARTIAL_LINE_DELAY_IN_FILES = 10.0  # s until it is shown elsewhere, as a line
_BAR_INTERVAL_IN_FILES = 60.0  # s between two states of one progress bar as lines of a file
_MAX_HELD = 8192  # characters; a longer unterminated line is neither a prompt nor a progress bar
# Control sequences except colors ("m"), and a sequence that is cut off.
_CURSOR_MOVES = re.compile(r"\x1b\[[0-?]*[ -/]*(?:[@-ln-~]|$)|\x1b$")
_MAX_ROWS = 100  # of progress bars below each other
_MOVE_UP = re.compile(r"\x1b\[(\d{0,2})A")
_ROW_MOVES = re.compile(r"(\n|\x1b\[\d{0,2}A)")
_CUT_MOVE = re.compile(r"\x1b(?:\[\d{0,2})?$")


@dataclass
class _Row:
    """One of several progress bars below each other, and what was shown of it as lines."""

    text: str = ""  # from its last carriage return on
    is_new: bool = False
    reported: str = ""
    reported_at: float = -math.inf

    @property
    def is_bar(self) -> bool:
        return self.text.startswith("\r") and len(self.text) <= _MAX_HELD

    def add(self, text: str) -> None:
        whole = self.text + text
        self.text, self.is_new = whole[max(whole.rstrip("\r").rfind("\r"), 0) :], True

    def due_state(self, now: float) -> str:
        """Return a new state that may be shown as a line now."""
        state = _visible(self.text) if self.is_new else ""
        if not state or now - self.reported_at < _BAR_INTERVAL_IN_FILES:
            return ""
        self.is_new, self.reported, self.reported_at = False, state, now
        return state

    def final_state(self, now: float) -> str:
        """Return the last state unless it was shown, and leave the row to the next bar."""
        state = _visible(self.text)
        if state == self.reported:
            state = ""
        self.text, self.is_new, self.reported = "", False, ""
        self.reported_at = now if state else self.reported_at
        return state


class _Rows:
    """Several progress bars below each other, such as those of nested loops with tqdm.

    The cursor moves down by a newline and up by a sequence. The bars end when they scroll out at
    the top, or when a line of other text follows.
    """

    def __init__(self, first: _Row) -> None:
        self.all = [first]
        self.written = first  # the last row that was
        self._at = 0  # the row of the cursor
        self._in_first_column = False

    def feed(self, text: str, now: float) -> tuple[list[str], str]:
        """Add text; return final states, and the other text that follows if the bars end."""
        ended = []
        parts = _ROW_MOVES.split(text)
        for number, part in enumerate(parts):
            row = self.all[self._at]
            if part == "\n":
                self._in_first_column = True
                self._at += 1
                if self._at == len(self.all):
                    self._at -= 1
                    self.all.append(self.all.pop(0))
                    ended.append(self.all[-1].final_state(now))
            elif move := _MOVE_UP.fullmatch(part):
                self._at -= int(move[1] or 1)
                shown_at = self.all[0].reported_at  # of bars that were taken for whole lines
                missing = min(-self._at, _MAX_ROWS - len(self.all))
                self.all[:0] = [_Row(reported_at=shown_at) for _ in range(missing)]
                self._at = max(self._at, 0)
            elif part:
                if self._in_first_column:
                    row.text, self._in_first_column = "", False
                row.add(part)
                self.written = row
                if not row.is_bar:
                    other, row.text = row.text, ""
                    return ended + self.final_states(now), other + "".join(parts[number + 1 :])
        return ended, ""

    def final_states(self, now: float) -> list[str]:
        return [row.final_state(now) for row in self.all]


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
        self._cut = ""  # a control sequence of which the end has not arrived
        self._rows: _Rows | None = None  # if there are several progress bars
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
        text = self._cut + self._decoder.decode(data, final)
        self._cut = ""
        if "\r" in text:
            text = text.replace("\r\n", "\n")
        if "\x1b" not in text and not self._rows:
            return self._feed_line(text, now)
        if not final and (cut := _CUT_MOVE.search(text)):
            text, self._cut = text[: cut.start()], cut[0]
        return iter([*self._feed_rows(text, now)])

    def _feed_rows(self, text: str, now: float) -> Iterator[Put]:
        while self._rows or _MOVE_UP.search(text):
            if not self._rows:
                held = self._take_held()
                self._rows = _Rows(_Row(held, bool(held), self._reported, self._reported_at))
                self._reported = ""
            ended, other = self._rows.feed(text, now)
            yield from self._lines_of(ended)
            if not other:
                self.state, self.has_new_state = _visible(self._rows.written.text), True
                return
            self._reported_at = max(row.reported_at for row in self._rows.all)
            self._rows, self.state = None, ""
            line, newline, text = other.partition("\n")
            yield from self._feed_line(line + newline, now)
        yield from self._feed_line(text, now)

    def _lines_of(self, states: Iterable[str]) -> Iterator[Put]:
        return (Put(self.stream, f"{self.prefix}{state}\n") for state in states if state)

    def _feed_line(self, text: str, now: float) -> Iterator[Put]:
        ended, newline, rest = text.rpartition("\n")
        lines = self._complete(ended) if newline else iter(())
        if rest:
            self._hold(rest, now)
        return lines

    def finish(self, now: float) -> Iterator[Put]:
        """Return the remaining text as if it were terminated."""
        puts = [*self.feed(b"", now, final=True)]
        if self._rows:
            puts += self._lines_of(self._rows.final_states(now))
            self._rows, self.state = None, ""
        return iter([*puts, *self._rest()])

    def _rest(self) -> Iterator[Put]:
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
        """Return a new state of each progress bar as a line, at a limited rate."""
        if self._rows:
            yield from self._lines_of(row.due_state(now) for row in self._rows.all)
            self.has_new_state = any(row.is_new for row in self._rows.all)
            return
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


_TICK_INTERVAL = 0.1  # s between two checks of all ranks for what is overdue
_STATUS_DELAY = 2.0  # s until a run has a status line
_STATUS_INTERVAL = 0.5  # s between two updates of that line
_STATUS_INTERVAL_IN_FILES = 30.0  # s between two of them as lines of a file
_SWITCH_INTERVALS = 1.0, 30.0  # s between a notebook's switches of stream: the first, the longest


class Console:
    """Shows the ranks' output as it arrives, each line with its rank as a prefix: ``[3] loss 0.2``.

    Progress bars move on a terminal. In files their state becomes a line from time to time, and in
    a notebook the last one does. Nothing that ranks print raises, nor does a failure of the
    driver's streams. All methods must be called from one thread.

    Parameters
    ----------
    is_shown : callable
        Returns whether a rank's output is shown.
    prefix : callable
        Returns the current prefix of a rank's lines.
    status : callable
        Returns the run's progress as text. A terminal shows it as a line that is updated in
        place, while no rank has a progress bar.
    has_progress : callable
        Returns whether rank 0 has reported progress: files then show the status too, from time to
        time, and all but notebooks at the end.
    clock : callable
        Returns monotonic seconds.
    screen : Screen
        The driver's streams.
    """

    def __init__(
        self,
        is_shown: Callable[[int], bool],
        *,
        prefix: Callable[[int], str] = lambda rank: f"[{rank}] ",
        status: Callable[[], str] = lambda: "",
        has_progress: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        screen: Screen = SCREEN,
    ) -> None:
        self._is_shown = is_shown
        self._prefix = prefix
        self._status = status
        self._has_progress = has_progress
        self._clock = clock
        self._screen = screen
        self._status_due = clock() + _STATUS_DELAY
        self._status_in_file_due = clock() + _STATUS_INTERVAL_IN_FILES
        self._status_line = ""
        self._buffers: dict[tuple[int, Stream], LineBuffer] = {}
        self._bar: LineBuffer | None = None  # the buffer whose progress bar was updated last
        self._pending: list[Put] = []
        self._blocks = _NotebookBlocks()
        self._ticked = -math.inf

    def write(self, rank: int, stream: Stream, data: bytes) -> None:
        """Add a rank's output, cut at any byte, and show the lines that it completes."""
        if not self._is_shown(rank):
            return
        buffer = self._buffers.get((rank, stream))
        if buffer is None:
            buffer = LineBuffer(lambda: colored(self._prefix(rank), rank, stream), stream)
            self._buffers[rank, stream] = buffer
        now = self._clock()
        self._show(buffer, buffer.feed(data, now), now)
        if not self.tick() and kind(stream) != "notebook":
            self._flush(now)  # a notebook is written to in few, larger pieces

    def tick(self) -> bool:
        """Show what is overdue, unless that was done just now; return whether it was.

        Must be called several times a second.
        """
        now = self._clock()
        if now - self._ticked < _TICK_INTERVAL:  # it takes longer the more ranks there are
            return False
        self._ticked = now
        for buffer in self._buffers.values():
            self._show(buffer, buffer.overdue(now), now)
        self._show_status(now)
        self._flush(now)
        return True

    def close(self) -> None:
        """Show the rest: unterminated lines, and the last state of progress bars."""
        now = self._clock()
        self._status_line = ""
        for _, buffer in sorted(self._buffers.items()):
            self._show(buffer, buffer.finish(now), now)
        self._flush(now, last=True)
        if kind("stderr") != "notebook" and self._has_progress():
            self._screen.print_message(self._status())

    def _show_status(self, now: float) -> None:
        if kind("stderr") == "notebook":
            return
        if kind("stderr"):
            if now >= self._status_due:
                self._status_due = now + _STATUS_INTERVAL
                self._status_line = self._status()
        elif now >= self._status_in_file_due and self._has_progress():
            self._status_in_file_due = now + _STATUS_INTERVAL_IN_FILES
            self._pending.append(Put("stderr", self._status() + "\n"))

    def _show(self, buffer: LineBuffer, puts: Iterator[Put], now: float) -> None:
        self._pending.extend(puts)
        if not buffer.has_new_state:
            return
        if not kind(buffer.stream):
            self._pending.extend(buffer.bar_as_line(now))
        else:
            buffer.has_new_state = False
            if buffer.state:
                self._bar = buffer

    def _flush(self, now: float, *, last: bool = False) -> None:
        puts, self._pending = self._pending, []
        if kind("stdout") == kind("stderr") == "notebook":
            puts = self._blocks.release(puts, now, last=last)
        self._screen.show(self, puts, self._live())

    def _live(self) -> Live | None:
        if self._bar and self._bar.state and kind(self._bar.stream) == "terminal":
            return Live(self._bar.stream, self._bar.prefix + self._bar.state, is_bar=True)
        return Live("stderr", self._status_line) if self._status_line else None


class _NotebookBlocks:
    """Delays text so that a notebook's two streams alternate less and less often.

    A notebook appends to its last output if that is of the same stream, and starts a new output
    otherwise. So text of the other stream is held back for some time.
    """

    def __init__(self) -> None:
        self._held: dict[Stream, list[Put]] = {"stdout": [], "stderr": []}
        self._current: Stream = "stdout"
        self._due = -math.inf
        self._interval = _SWITCH_INTERVALS[0]

    def release(self, puts: list[Put], now: float, *, last: bool) -> list[Put]:
        """Add text, and return the text to write now."""
        for put in puts:
            self._held[put.stream].append(put)
        out = self._take(self._current)
        other: Stream = "stderr" if self._current == "stdout" else "stdout"
        if self._held[other] and (last or now >= self._due):
            out += self._take(other)
            self._current, self._due = other, now + self._interval
            self._interval = min(2 * self._interval, _SWITCH_INTERVALS[1])
        return out

    def _take(self, stream: Stream) -> list[Put]:
        puts, self._held[stream] = self._held[stream], []
        return puts
