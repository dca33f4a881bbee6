"""The ranks' output on the driver: line by line as it arrives, each line with its rank.

`LineBuffer` reassembles the lines, `_NotebookBlocks` keeps a notebook's output in few blocks, and
`Console` decides what is shown, and when.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from distributor.screen.line_buffer import LineBuffer
from distributor.screen.screen import SCREEN, Live, Put, Screen, colored, kind
from distributor.wire.messages import Stream

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
