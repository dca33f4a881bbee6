"""The driver's stdout and stderr, which all runs and messages of this process share.

A message starts in the first column, whatever is on the screen: an unterminated line is ended
first, and the live line (a progress bar, or the status of a run) is erased and drawn again below.
A notebook has no live line: see `run_block`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Literal, TextIO

from distributor.wire.messages import Stream

ERASE = "\r\x1b[K"
COLORS = (36, 33, 32, 35, 34, 31)
"""Terminals' codes of cyan, yellow, green, magenta, blue and red."""


@dataclass(frozen=True)
class Put:
    """Text for one of the driver's streams.

    Parameters
    ----------
    stream : "stdout" or "stderr"
        The stream.
    text : str
        Whole lines; or, if `line` is given, a part of that line.
    line : object, optional
        The unterminated line that the text belongs to.
    prefix : str
        Precedes the text unless that line is the last thing on the screen.
    partly_shown : bool
        Whether an earlier part of the line was shown. If so, its newline alone adds nothing.
    """

    stream: Stream
    text: str
    line: object = None
    prefix: str = ""
    partly_shown: bool = False


@dataclass(frozen=True)
class Live:
    """A run's live line, which is updated in place.

    Parameters
    ----------
    stream : "stdout" or "stderr"
        The stream that shows it.
    text : str
        Its current text.
    is_bar : bool
        Whether it is a rank's progress bar, which is not hidden by an unterminated line.
    """

    stream: Stream
    text: str
    is_bar: bool = False


class Screen:
    """Writes to the current ``sys.stdout`` and ``sys.stderr``. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._live: dict[object, Live] = {}
        self._drawn: tuple[Stream, str] | None = None  # the live line on a terminal, at the bottom
        self._unterminated: tuple[object, Stream, TextIO] | None = None
        self._broken: dict[Stream, TextIO] = {}

    def show(self, run: object, puts: Sequence[Put], live: Live | None) -> None:
        """Write text, with the run's live line below it."""
        with self._lock:
            self._note_live(run, live)
            self._write(puts)

    def print_message(self, message: str) -> None:
        """Write a message of this package to stderr; a notebook shows that as an error."""
        with self._lock:
            stream: Stream = "stdout" if kind("stderr") == "notebook" else "stderr"
            self._write([Put(stream, message + "\n")])

    def clear_line(self) -> None:
        """Move the cursor to the start of an empty line, so that other code can write there."""
        with self._lock:
            self._send([*self._finish_line(), *self._erase("stderr")])

    def _note_live(self, run: object, live: Live | None) -> None:
        if live is not None and live.text and kind(live.stream) == "terminal":
            self._live[run] = live
        else:
            self._live.pop(run, None)

    def _write(self, puts: Sequence[Put]) -> None:
        on_terminal = [put.stream for put in puts if kind(put.stream) == "terminal"]
        wanted = self._wanted()
        texts = [text for put in puts for text in self._rendered(put)]
        if on_terminal or wanted != self._drawn:
            texts = [*self._erase(on_terminal[0] if on_terminal else "stderr"), *texts]
            texts += self._draw(self._wanted())
        self._send(texts)

    def _rendered(self, put: Put) -> Iterator[tuple[Stream, str]]:
        if put.line is not None and self._is_last(put.line):
            text = put.text
        elif put.partly_shown and put.text == "\n":
            return
        else:
            if kind(put.stream):
                yield from self._finish_line()
            text = put.prefix + put.text
        yield put.stream, text
        out = getattr(sys, put.stream)
        if put.line is not None and out is not None and kind(put.stream):
            ended = text.endswith("\n")
            self._unterminated = None if ended else (put.line, put.stream, out)

    def _is_last(self, line: object) -> bool:
        return (
            self._unterminated is not None and self._unterminated[0] is line and self._is_current()
        )

    def _is_current(self) -> bool:
        """Return whether the unterminated line's stream is still the driver's."""
        return self._unterminated is not None and (
            getattr(sys, self._unterminated[1]) is self._unterminated[2]
        )

    def _finish_line(self) -> Iterator[tuple[Stream, str]]:
        if self._unterminated is not None and self._is_current():
            yield self._unterminated[1], "\n"
        self._unterminated = None

    def _wanted(self) -> tuple[Stream, str] | None:
        """Return the live line of all runs. An unterminated line hides all but progress bars."""
        lines = [
            live
            for live in self._live.values()
            if kind(live.stream) == "terminal" and (live.is_bar or self._unterminated is None)
        ]
        return (lines[-1].stream, " | ".join(live.text for live in lines)) if lines else None

    def _erase(self, stream: Stream) -> list[tuple[Stream, str]]:
        drawn, self._drawn = self._drawn, None
        return [(stream, ERASE)] if drawn and kind(stream) == "terminal" else []

    def _draw(self, wanted: tuple[Stream, str] | None) -> list[tuple[Stream, str]]:
        if wanted is None:
            return []
        self._drawn = wanted
        stream, text = wanted
        # Wrapping is off, because "\r" does not return to the start of a line that has wrapped.
        # The cursor stays in the first column, because other code, such as Spark's log, writes too.
        line = f"\x1b[?7l\r{text}\r\x1b[?7h"
        return [*self._finish_line(), (stream, line)]

    def _send(self, texts: Sequence[tuple[Stream, str]]) -> None:
        for stream, group in groupby(texts, key=itemgetter(0)):
            out: TextIO | None = getattr(sys, stream)
            if out is None or out is self._broken.get(stream):
                continue
            if not _put(out, "".join(text for _, text in group)):
                self._broken[stream] = out


SCREEN = Screen()
"""The screen of this process."""


def kind(stream: Stream) -> Literal["terminal", "notebook"] | None:
    """Return what a stream of the driver is, if a line on it can be updated in place."""
    out = getattr(sys, stream)
    if type(out).__module__.startswith("ipykernel"):
        return "notebook"
    with suppress(Exception):  # it may be closed, None, or the user's own
        return "terminal" if out.isatty() else None
    return None


def colored(text: str, number: int, stream: Stream) -> str:
    """Return text in the color of a number, if a stream is a terminal that shows colors.

    The environment variable ``NO_COLOR`` turns them off: https://no-color.org
    """
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if plain or kind(stream) != "terminal":
        return text
    return f"\x1b[{COLORS[number % len(COLORS)]}m{text}\x1b[0m"


def _put(out: TextIO, text: str) -> bool:
    """Write and flush. Return False if the stream fails, which must not end the training."""
    with suppress(Exception):
        try:
            out.write(text)
        except UnicodeEncodeError:
            encoding = out.encoding or "ascii"
            out.write(text.encode(encoding, "backslashreplace").decode(encoding))
        out.flush()
        return True
    return False
