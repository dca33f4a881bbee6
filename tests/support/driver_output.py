"""Streams and a console for tests of the driver's output."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from typing import Any

from distributor.screen.console import Console
from distributor.screen.screen import Screen
from distributor.wire.messages import Stream

Chunk = tuple[int, Stream, bytes]


class Clock:
    """A clock that tests set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Notebook(io.StringIO):
    """A stream that is recognized, as ipykernel's is, by the module of its type."""

    __module__ = "ipykernel.iostream"


def on_screen(text: str) -> list[str]:
    """Return the lines that a terminal of 80 columns shows after this text."""
    lines, column, wraps = [""], 0, True
    for token in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|.|\n", text):
        if token == "\n":
            lines.append("")
            column = 0
        elif token == "\r":
            column = 0
        elif token == "\x1b[K":
            lines[-1] = lines[-1][:column]
        elif token in ("\x1b[?7l", "\x1b[?7h"):
            wraps = token.endswith("h")
        else:
            assert token >= " ", f"an unexpected control sequence {token!r}"
            if column == 80:
                lines, column = ([*lines, ""], 0) if wraps else (lines, 79)
            lines[-1] = lines[-1][:column].ljust(column) + token + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


class DriverOutput:
    """A console whose clock and streams belong to the test."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.status, self.has_progress = "", False
        self.shared = Screen()
        self.console = Console(
            lambda rank: rank != 99,
            status=lambda: self.status,
            has_progress=lambda: self.has_progress,
            clock=self.clock,
            screen=self.shared,
        )
        self.streams(io.StringIO(), io.StringIO())

    def streams(self, stdout: Any, stderr: Any) -> None:
        self.stdout, self.stderr = stdout, stderr

    def screen(self, kind: type[io.StringIO]) -> io.StringIO:
        """Use one screen for both streams."""
        screen = kind()
        self.streams(screen, screen)
        return screen

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        with contextlib.redirect_stdout(self.stdout), contextlib.redirect_stderr(self.stderr):
            yield

    def write(self, *chunks: Chunk) -> None:
        with self.here():
            for chunk in chunks:
                self.console.write(*chunk)

    def bar(self, *states: str, rank: int = 0, every: float = 0.0) -> None:
        for state in states:
            self.write((rank, "stderr", f"\r{state}".encode()))
            self.clock.now += every

    def tick(self, after: float = 0.2) -> None:  # a console does nothing 0.1 s after the last tick
        self.clock.now += after
        with self.here():
            self.console.tick()

    def close(self) -> None:
        with self.here():
            self.console.close()

    def out(self) -> str:
        return str(self.stdout.getvalue())

    def err(self) -> str:
        return str(self.stderr.getvalue())
