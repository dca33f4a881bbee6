"""Ranks' output as the user sees it: in files, on terminals, in notebooks, on broken streams."""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import logging
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

import distributor
from distributor.core.text import counted, listed
from distributor.launch.output.console import Console, Stream
from distributor.launch.output.labels import RunLabel
from distributor.launch.output.messages import notify, warn
from distributor.launch.output.run_progress import RunProgress
from distributor.launch.output.screen import Screen
from distributor.launch.retry import FailedAttempt

Chunk = tuple[int, Stream, bytes]
MIB = 2**20


class Clock:
    """Time that moves when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Notebook(io.StringIO):
    """A stream that is told by the name of its type's module, as ipykernel's is."""

    __module__ = "ipykernel.iostream"


def on_screen(text: str, width: int = 80) -> list[str]:
    """The lines that a terminal of this width shows after this text."""
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
            if column == width:
                lines, column = ([*lines, ""], 0) if wraps else (lines, width - 1)
            lines[-1] = lines[-1][:column].ljust(column) + token + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


class Displayed(list[str]):
    """A notebook's output that is updated in place: all that it ever showed."""

    def update(self, text: str) -> None:  # type: ignore[override]
        self.append(text)


class Driver:
    """A console whose time and streams are the test's."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.headline, self.reported = "", False
        self.displays: list[Displayed] = []
        self.shared = Screen(self._make_display)
        self.console = Console(
            lambda rank: rank != 99,
            status=lambda: self.headline,
            has_progress=lambda: self.reported,
            clock=self.clock,
            screen=self.shared,
        )
        self.streams(io.StringIO(), io.StringIO())

    def _make_display(self) -> Displayed:
        self.displays.append(Displayed())
        return self.displays[-1]

    def streams(self, stdout: Any, stderr: Any) -> None:
        self.stdout, self.stderr = stdout, stderr

    def screen(self, kind: type[io.StringIO]) -> io.StringIO:
        """One screen for both streams."""
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

    def tick(self, after: float = 0.0) -> None:
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


@pytest.fixture
def driver() -> Driver:
    return Driver()


LINES: dict[str, tuple[list[Chunk], str]] = {
    "a line": ([(3, "stdout", b"epoch 1 loss 0.2\n")], "[3] epoch 1 loss 0.2\n"),
    "many in a chunk": ([(0, "stdout", b"a\nb\n\nc\n")], "[0] a\n[0] b\n[0] \n[0] c\n"),
    "cut mid line": ([(0, "stdout", b"a\nhel"), (0, "stdout", b"lo\n")], "[0] a\n[0] hello\n"),
    "cut before the newline": ([(0, "stdout", b"a"), (0, "stdout", b"\nb\n")], "[0] a\n[0] b\n"),
    "cut mid character": (
        [(0, "stdout", b"\xe2"), (0, "stdout", b"\x82"), (0, "stdout", b"\xac 5\n")],
        "[0] € 5\n",
    ),
    "not UTF-8": ([(0, "stdout", b"a\xff\xfe\xe2\x82b\n")], "[0] a\\xff\\xfe\\xe2\\x82b\n"),
    "half a character at the end": ([(0, "stdout", b"a\xe2\x82")], "[0] a\\xe2\\x82\n"),
    "nothing": ([(0, "stdout", b"")], ""),
    "no newline at the end": ([(0, "stdout", b"a\nbye")], "[0] a\n[0] bye\n"),
    "ranks mid line": (
        [(0, "stdout", b"a"), (1, "stdout", b"x\ny"), (0, "stdout", b"b\n"), (1, "stdout", b"z\n")],
        "[1] x\n[0] ab\n[1] yz\n",
    ),
    "streams mid line": (
        [(0, "stdout", b"a"), (0, "stderr", b"x"), (0, "stdout", b"b\n")],
        "[0] ab\n",
    ),
    "a rank that is not shown": ([(99, "stdout", b"a\n"), (99, "stdout", b"b")], ""),
    "Windows' line ends": ([(0, "stdout", b"a\r\nb\r\n\r\nc\r\n")], "[0] a\n[0] b\n[0] \n[0] c\n"),
    "a line end in two": ([(0, "stdout", b"a\r"), (0, "stdout", b"\nb\n")], "[0] a\n[0] b\n"),
    "a line end with two returns": ([(0, "stdout", b"a\r\r\nb\n")], "[0] a\n[0] b\n"),
    "two returns in two": ([(0, "stdout", b"a\r"), (0, "stdout", b"\r\nb\n")], "[0] a\n[0] b\n"),
    "colours": ([(0, "stdout", b"\x1b[31mred\x1b[0m\n")], "[0] \x1b[31mred\x1b[0m\n"),
}


@pytest.mark.parametrize(("chunks", "expected"), LINES.values(), ids=LINES)
def test_lines(driver: Driver, chunks: list[Chunk], expected: str) -> None:
    driver.write(*chunks)
    driver.close()
    assert driver.out() == expected


def test_what_is_left_is_shown_once_rank_by_rank(driver: Driver) -> None:
    driver.write((1, "stdout", b"one"), (0, "stdout", b"zero"))
    driver.close()
    driver.close()
    assert driver.out() == "[0] zero\n[1] one\n"


def test_each_stream_goes_to_its_own(driver: Driver) -> None:
    driver.write((0, "stdout", b"out\n"), (0, "stderr", b"err\n"))
    assert (driver.out(), driver.err()) == ("[0] out\n", "[0] err\n")


def test_streams_are_looked_up_at_each_write(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console, cell = Console(lambda rank: True), io.StringIO()
    console.write(0, "stdout", b"before\n")
    with contextlib.redirect_stdout(cell):
        console.write(0, "stdout", b"inside\n")
    console.write(0, "stdout", b"after\n")
    assert cell.getvalue() == "[0] inside\n"
    assert capsys.readouterr().out == "[0] before\n[0] after\n"


NASTY = (
    "ä\n€uro\r\n\n\r\nplain 🙂 line\r\r\nlast\n".encode() + b"\xff\xe2\x82\n\xc3\r\ntail \xf0\x9f"
)
NASTY_BARS = "start\n\r 1%\r 20% ü\r\n\r1\r22\r333 \x1b[K\r\n\r4%\r     \rdone\nrest".encode()


def every_cut(data: bytes) -> Iterator[list[bytes]]:
    yield [data]
    yield [data[i : i + 1] for i in range(len(data))]
    for i in range(1, len(data)):
        yield [data[:i], data[i:]]


def test_cuts_do_not_change_lines(driver: Driver) -> None:
    shown = set()
    for chunks in every_cut(NASTY):
        driver.streams(io.StringIO(), io.StringIO())
        driver.write(*((0, "stdout", chunk) for chunk in chunks))
        driver.close()
        shown.add(driver.out())
    expected = (
        "[0] ä\n[0] €uro\n[0] \n[0] \n[0] plain 🙂 line\n[0] last\n"
        "[0] \\xff\\xe2\\x82\n[0] \\xc3\n[0] tail \\xf0\\x9f\n"
    )
    assert shown == {expected}


@pytest.mark.parametrize("kind", [Terminal, Notebook])
def test_cuts_do_not_change_a_screen(driver: Driver, kind: type[io.StringIO]) -> None:
    for chunks in every_cut(NASTY_BARS):
        screen = driver.screen(kind)
        driver.write(*((0, "stderr", chunk) for chunk in chunks))
        driver.close()
        expected = ["[0] start", "[0]  20% ü", "[0] 333", "[0] done", "[0] rest", ""]
        assert on_screen(screen.getvalue()) == expected, chunks


# What does not raise ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("ascii", rb"[0] \xe4 \u20ac"),
        ("latin-1", b"[0] \xe4 \\u20ac"),
        ("cp1252", b"[0] \xe4 \x80"),
    ],
)
def test_narrow_encodings(driver: Driver, encoding: str, expected: bytes) -> None:
    log = io.BytesIO()
    driver.streams(io.TextIOWrapper(log, encoding), None)
    driver.write((0, "stdout", "ä €\n".encode()), (0, "stdout", b"plain\n"))
    assert log.getvalue() == expected + b"\n[0] plain\n"


class Broken(io.StringIO):
    """A stream that fails, and counts how often it was asked."""

    def __init__(self, error: Exception, *, tty: bool) -> None:
        super().__init__()
        self.error, self.tty, self.asked = error, tty, 0

    def isatty(self) -> bool:
        return self.tty

    def write(self, text: str, /) -> int:
        self.asked += 1
        raise self.error


@pytest.mark.parametrize("tty", [False, True])
@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "full"), RuntimeError("odd")])
def test_a_broken_stream_is_left_alone(driver: Driver, error: Exception, tty: bool) -> None:
    broken = Broken(error, tty=tty)
    driver.streams(broken, io.StringIO())
    driver.write((0, "stdout", b"a\n"), (0, "stdout", b"\rbar"), (0, "stdout", b"b\n"))
    driver.write((0, "stderr", b"still here\n"))
    assert broken.asked == 1
    assert driver.err() == "[0] still here\n"
    driver.streams(io.StringIO(), None)
    driver.write((0, "stdout", b"a new stream\n"))
    assert driver.out() == "[0] a new stream\n"


def closed() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("gone", [None, closed(), object()], ids=["None", "closed", "no stream"])
def test_no_stream_at_all(driver: Driver, gone: Any) -> None:
    driver.streams(gone, gone)
    driver.write((0, "stdout", b"a\n"), (0, "stderr", b"\rb"), (0, "stderr", b"c"))
    driver.tick()
    driver.close()
    with driver.here():
        notify("hello")
    driver.streams(io.StringIO(), None)
    driver.write((0, "stdout", b"here again\n"))
    assert driver.out() == "[0] here again\n"


# Long lines and lines without an end --------------------------------------------------------------


def test_a_long_line_arrives_whole(driver: Driver) -> None:
    """Also one that takes seconds to come: it is no prompt."""
    line = b"0123456789abcdef" * (MIB // 8)
    for start in range(0, len(line), MIB // 16):
        driver.write((0, "stdout", line[start : start + MIB // 16]), (1, "stdout", b"x\n"))
        driver.tick(after=0.5)
    driver.write((0, "stdout", b"\n"))
    assert driver.out().replace("[1] x\n", "") == f"[0] {line.decode()}\n"


@pytest.mark.parametrize("start", [b"", b"\r"], ids=["line", "bar"])
@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_long_line_in_small_pieces(driver: Driver, kind: type[io.StringIO], start: bytes) -> None:
    """Joining the pieces at each write would copy a quarter of a terabyte."""
    screen = driver.screen(kind)
    chunks = [start, *[b"x" * 50] * 100_000, b"\n"]
    driver.write(*((0, "stdout", chunk) for chunk in chunks))
    assert screen.getvalue().endswith("[0] " + "x" * 5_000_000 + "\n")


def test_a_prompt_is_seen(driver: Driver) -> None:
    driver.write((0, "stdout", b"Continue? "))
    driver.tick(after=9.9)
    assert driver.out() == ""
    driver.tick(after=0.2)
    driver.tick()
    assert driver.out() == "[0] Continue? \n"
    driver.write((0, "stdout", b"yes\nnext\n"))
    assert driver.out() == "[0] Continue? \n[0] yes\n[0] next\n"


@pytest.mark.parametrize("end", [[b"\n"], [b"\r\n"], [b"\r", b"\n"], [b"", b"\n"]])
def test_the_newline_of_a_prompt_is_not_an_empty_line(driver: Driver, end: list[bytes]) -> None:
    driver.write((0, "stdout", b"loading..."))
    driver.tick(after=15)
    driver.write(*((0, "stdout", piece) for piece in end), (0, "stdout", b"\nnext\n"))
    assert driver.out() == "[0] loading...\n[0] \n[0] next\n"


def test_another_write_shows_a_prompt(driver: Driver) -> None:
    driver.write((0, "stdout", b"Continue? "))
    driver.clock.now += 15
    driver.write((1, "stderr", b"x\n"))
    assert driver.out() == "[0] Continue? \n"


def test_dots_are_seen_while_they_come(driver: Driver) -> None:
    driver.write((0, "stdout", b"a long line " * 1000), (0, "stdout", b"\n"))
    driver.streams(io.StringIO(), None)
    for _ in range(6):
        driver.write((0, "stdout", b"."))
        driver.tick(after=5)
    assert driver.out() == "[0] ..\n" * 3


def test_a_late_end_completes_its_line(driver: Driver) -> None:
    driver.write((0, "stdout", b"hel"))
    driver.clock.now += 5
    driver.write((0, "stdout", b"lo\n"))
    assert driver.out() == "[0] hello\n"


# Progress bars in files ---------------------------------------------------------------------------


def test_a_file_gets_two_states_a_second_and_the_last(driver: Driver) -> None:
    driver.bar(*(f"{i}%" for i in range(100)), every=0.0625)
    driver.write((0, "stderr", b"\r100%\n"))
    states = [f"[0] {i}%" for i in range(0, 100, 8)]
    assert driver.err().splitlines() == [*states, "[0] 100%"]


def test_each_rank_and_stream_has_its_own_rate(driver: Driver) -> None:
    driver.bar("1%", "2%")
    driver.bar("1%", "2%", rank=1)
    driver.write((0, "stdout", b"\r1%"), (0, "stdout", b"\r2%"))
    assert (driver.out(), driver.err()) == ("[0] 1%\n", "[0] 1%\n[1] 1%\n")


def test_a_state_that_waited_is_shown_by_tick(driver: Driver) -> None:
    driver.bar("1%", "2%", "3%")
    driver.tick()
    assert driver.err() == "[0] 1%\n"
    driver.tick(after=0.5)
    driver.tick(after=5)
    assert driver.err() == "[0] 1%\n[0] 3%\n"


BARS: dict[str, tuple[list[bytes], list[str]]] = {
    "the last state, at the newline": ([b"\r1%", b"\r2%", b"\r3%", b"\n"], ["1%", "3%"]),
    "the last state, at the end": ([b"\r1%", b"\r2%", b"\r3%"], ["1%", "3%"]),
    "the last state, before a return": ([b"1%\r", b"2%\r", b"3%\r"], ["2%", "3%"]),
    "the last state in a chunk": ([b"\r1%\r2%\r3%"], ["3%"]),
    "the last state of each line in a chunk": ([b"\r1%\r2%\n\r7%\r8%\nx\n"], ["2%", "8%", "x"]),
    "a state once": ([b"\r1%", b"\n", b"next\n"], ["1%", "next"]),
    "a state once, at the end": ([b"\r1%"], ["1%"]),
    "a state again on another line": ([b"\r1%", b"\n\r1%\n"], ["1%", "1%"]),
    "a cleared bar": ([b"\r1%", b"\r    ", b"\r", b"\n"], ["1%"]),
    "a bar cleared by a sequence": ([b"\r1%", b"\r\x1b[2K", b"\r\x1b[K", b"\rhi\n"], ["1%", "hi"]),
    "blanks alone": ([b"\r   ", b"\r\r", b"\r  \r\n"], []),
    "a line after a cleared bar": ([b"\r1%", b"\r    \rdone\nnext\n"], ["1%", "done", "next"]),
    "colours stay, moves go": ([b"\r\x1b[?25l\x1b[32m1%\x1b[0m\x1b[A\n"], ["\x1b[32m1%\x1b[0m"]),
    "text, then a bar": ([b"load: \r1%", b"\n"], ["1%"]),
}


@pytest.mark.parametrize(("chunks", "expected"), BARS.values(), ids=BARS)
def test_bars_in_a_file(driver: Driver, chunks: list[bytes], expected: list[str]) -> None:
    driver.write(*((0, "stderr", chunk) for chunk in chunks))
    driver.close()
    assert driver.err() == "".join(f"[0] {line}\n" for line in expected)


# Progress bars on screens -------------------------------------------------------------------------


def test_a_bar_moves_on_a_terminal(driver: Driver) -> None:
    screen = driver.screen(Terminal)
    driver.bar("99 of 100", "1%")
    assert "\r[0] 99 of 100" in screen.getvalue()
    assert on_screen(screen.getvalue()) == ["[0] 1%"]
    driver.write((0, "stderr", b"\n"))
    assert on_screen(screen.getvalue()) == ["[0] 1%", ""]


SCREENS: dict[str, tuple[list[Chunk], list[str]]] = {
    "lines go above": (
        [(0, "stderr", b"\r1%"), (1, "stdout", b"x\ny\n")],
        ["[1] x", "[1] y", "[0] 1%"],
    ),
    "its own rank's lines too": (
        [(0, "stderr", b"\r1%"), (0, "stdout", b"x\n")],
        ["[0] x", "[0] 1%"],
    ),
    "a part of a line changes nothing": ([(0, "stderr", b"\r1%"), (1, "stderr", b"x")], ["[0] 1%"]),
    "the last updated moves": (
        [(0, "stderr", b"\r1% of much"), (1, "stdout", b"\r2%"), (0, "stdout", b"x\n")],
        ["[0] x", "[1] 2%"],
    ),
    "the last updated, not the last begun": (
        [(0, "stderr", b"\r1%"), (1, "stderr", b"\r7%"), (0, "stderr", b"\r2%")],
        ["[0] 2%"],
    ),
    "a finished bar is a line": (
        [(0, "stderr", b"\r1%"), (0, "stderr", b"\r2%\n")],
        ["[0] 2%", ""],
    ),
    "another's bar goes on": (
        [(0, "stderr", b"\r1%"), (1, "stderr", b"\r7%"), (0, "stderr", b"\r2%\n")],
        ["[0] 2%", "[1] 7%"],
    ),
    "a bar follows a bar": (
        [(0, "stderr", b"\r1%"), (0, "stderr", b"\r2%\n\r0%")],
        ["[0] 2%", "[0] 0%"],
    ),
    "a cleared bar goes": (
        [(0, "stderr", b"\r1%"), (0, "stderr", b"\r   \r"), (0, "stderr", b"\r")],
        [""],
    ),
    "a cleared bar ends without a line": (
        [(0, "stderr", b"\r1%"), (0, "stderr", b"\r   "), (0, "stderr", b"\nx\n")],
        ["[0] x", ""],
    ),
    "another's cleared bar leaves it": (
        [(1, "stderr", b"\r1%"), (0, "stderr", b"\r2%"), (1, "stderr", b"\r   ")],
        ["[0] 2%"],
    ),
    "a state cut in two": ([(0, "stderr", b"\r 4"), (0, "stderr", b"5%")], ["[0]  45%"]),
}


@pytest.mark.parametrize(("chunks", "expected"), SCREENS.values(), ids=SCREENS)
def test_bars_on_a_terminal(driver: Driver, chunks: list[Chunk], expected: list[str]) -> None:
    screen = driver.screen(Terminal)
    driver.write(*chunks)
    driver.tick()
    assert on_screen(screen.getvalue()) == expected


@pytest.mark.parametrize(("chunks", "expected"), SCREENS.values(), ids=SCREENS)
def test_bars_in_a_notebook(driver: Driver, chunks: list[Chunk], expected: list[str]) -> None:
    screen = driver.screen(Notebook)
    driver.headline = "train on 2 ranks"
    driver.write(*chunks)
    driver.tick()
    assert screen.getvalue().splitlines() == expected[:-1]
    [display] = driver.displays
    assert display[-1] == (expected[-1] or driver.headline)


@pytest.mark.parametrize("kind", [Terminal, Notebook])
def test_close_leaves_all_bars_as_lines(driver: Driver, kind: type[io.StringIO]) -> None:
    screen = driver.screen(kind)
    driver.bar("1%", "2%", rank=1)
    driver.bar("3% and more", rank=0)
    driver.bar("   ", rank=2)
    driver.close()
    assert on_screen(screen.getvalue()) == ["[0] 3% and more", "[1] 2%", ""]


def test_a_prompt_stands_above_a_bar(driver: Driver) -> None:
    screen = driver.screen(Terminal)
    driver.write((1, "stdout", b"Continue? "))
    driver.bar("1%")
    driver.tick(after=2)
    assert on_screen(screen.getvalue()) == ["[1] Continue?", "[0] 1%"]


def test_a_file_beside_a_terminal_gets_no_sequences(driver: Driver) -> None:
    driver.streams(io.StringIO(), Terminal())
    driver.bar("1%")
    drawn = driver.err()
    driver.write((0, "stdout", b"x\n"), (0, "stdout", b"\r5%"))
    assert driver.out() == "[0] x\n[0] 5%\n"
    assert driver.err() == drawn


def test_a_bar_is_not_drawn_into_what_became_a_file(driver: Driver) -> None:
    driver.screen(Terminal)
    driver.bar("1%")
    driver.streams(driver.stdout, io.StringIO())
    driver.write((0, "stdout", b"x\n"))
    driver.tick()
    assert driver.err() == ""


def blocks(puts: list[Stream]) -> list[Stream]:
    """The outputs of a cell: one for each stream that follows another."""
    return [stream for stream, _ in itertools.groupby(puts)]


class Cell(Notebook):
    """A stream of a notebook, which notes when it is written to."""

    __module__ = "ipykernel.iostream"

    def __init__(self, name: Stream, puts: list[Stream]) -> None:
        super().__init__()
        self.name, self.puts = name, puts

    def write(self, text: str, /) -> int:
        self.puts.append(self.name)
        return super().write(text)


def test_a_notebooks_streams_are_few_blocks(driver: Driver) -> None:
    """Two ranks print to both streams once a second, for five minutes."""
    puts: list[Stream] = []
    driver.streams(Cell("stdout", puts), Cell("stderr", puts))
    for second in range(300):
        driver.headline = f"train on 2 ranks, {second}"
        for rank in range(2):
            driver.write((rank, "stdout", b"out\n"), (rank, "stderr", b"err\n"))
        for _ in range(5):
            driver.tick(after=0.2)
        if second == 29:
            assert len(blocks(puts)) <= 6
    driver.close()
    assert len(blocks(puts)) < 20
    assert driver.out() == "[0] out\n[1] out\n" * 300
    assert driver.err() == "[0] err\n[1] err\n" * 300
    [display] = driver.displays
    assert display[-1] == "train on 2 ranks, 299"


def test_a_notebook_is_written_to_in_few_pieces(driver: Driver) -> None:
    puts: list[Stream] = []
    driver.streams(Cell("stdout", puts), Cell("stderr", puts))
    driver.write(*[(rank % 8, "stdout", b"line\n") for rank in range(800)])
    driver.tick()
    assert len(puts) <= 2
    assert len(driver.out().splitlines()) == 800


def test_a_real_terminal() -> None:
    """A pseudo-terminal of 20 columns, with bars as wide as it and wider."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    driver = Driver()
    with open(slave, "w") as terminal:
        driver.streams(terminal, terminal)
        driver.bar(" 1%" + "#" * 13, " 2%" + "#" * 40, " 3%" + "-" * 16)
        driver.write((1, "stdout", b"hello\n"))
        terminal.write("<here>")
        driver.write((0, "stderr", b"\r 4%\n"))
        driver.close()
    before, after = received(master).split("<here>")
    assert on_screen(before, 20) == ["[1] hello", "[0]  3%" + "-" * 13]
    assert on_screen(before + after, 20) == ["[1] hello", "[0]  4%", ""]


def received(master: int) -> str:
    """All that a terminal gets until nobody has it open any more."""
    data = b""
    with open(master, "rb", buffering=0) as terminal, contextlib.suppress(OSError):
        while more := terminal.read(65536):
            data += more
    return data.decode()


IN_A_CELL = """
from distributor.launch.output.console import Console
console = Console(lambda rank: True)
console.write(0, "stderr", b"\\r10% of all")
console.write(0, "stderr", b"\\r20%")
console.write(1, "stdout", b"hello\\n")
console.write(0, "stderr", b"\\r30%\\n")
console.close()
"""


def test_a_real_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipykernel")
    jupyter_client = pytest.importorskip("jupyter_client")
    for variable in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    manager, client = jupyter_client.manager.start_new_kernel()
    outputs: dict[str, str] = {"stdout": "", "stderr": ""}
    displays = []

    def collect(message: dict[str, Any]) -> None:
        if message["msg_type"] == "display_data":
            displays.append(message["content"]["data"]["text/plain"])
        if message["msg_type"] == "stream":
            outputs[message["content"]["name"]] += message["content"]["text"]

    try:
        reply = client.execute_interactive(IN_A_CELL, timeout=60, output_hook=collect)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert reply["content"]["status"] == "ok", reply
    assert outputs["stdout"] == "[1] hello\n"
    assert on_screen(outputs["stderr"]) == ["[0] 30%", ""]
    assert "\r" not in outputs["stderr"]
    assert len(displays) == 1, "the bar moves in one output"
    assert "\x1b" not in outputs["stderr"]


# How often streams are asked ----------------------------------------------------------------------


class Counted(Terminal):
    """Counts what is asked of it."""

    def __init__(self, *, tty: bool) -> None:
        super().__init__()
        self.tty, self.writes, self.flushes = tty, 0, 0

    def isatty(self) -> bool:
        return self.tty

    def write(self, text: str, /) -> int:
        self.writes += 1
        return super().write(text)

    def flush(self) -> None:
        self.flushes += 1


CHUNKS = (b"a\nb\nc\n" * 1000, b"a\nb", b"\r1%\n\r2%\nx\n\r3%", b"\r4%", b"a\r\nb\r\n")


@pytest.mark.parametrize("tty", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_one_write_and_one_flush_a_chunk(driver: Driver, chunk: bytes, tty: bool) -> None:
    stdout, stderr = Counted(tty=tty), Counted(tty=tty)
    driver.streams(stdout, stderr)
    driver.bar("1%", rank=1)  # on a terminal it is erased and drawn again around all that follows
    driver.write((2, "stdout", b"a prompt"))
    driver.clock.now += 2
    stderr.writes = stderr.flushes = 0
    driver.write((0, "stdout", chunk))
    assert stdout.writes == stdout.flushes == 1
    assert stderr.writes == stderr.flushes <= 1


def test_nothing_to_show_asks_for_nothing(driver: Driver) -> None:
    stream = Counted(tty=True)
    driver.streams(stream, stream)
    driver.write((0, "stdout", b"part"), (0, "stdout", b""), (99, "stdout", b"x\n"))
    driver.tick()
    assert (stream.writes, stream.flushes) == (0, 0)


def test_a_headline_moves_below_what_is_printed(driver: Driver) -> None:
    screen = driver.screen(Terminal)
    driver.headline = "train on 2 ranks, 00:01"
    driver.tick()
    assert screen.getvalue() == "", "a short run has none"
    driver.tick(after=2.0)
    assert on_screen(screen.getvalue()) == ["train on 2 ranks, 00:01"]
    driver.headline = "train on 2 ranks, 00:03"
    driver.tick(after=2.0)
    driver.write((0, "stdout", b"a line\n"))
    assert on_screen(screen.getvalue()) == ["[0] a line", "train on 2 ranks, 00:03"]
    driver.close()
    assert on_screen(screen.getvalue()) == ["[0] a line", ""]


def test_a_ranks_own_bar_comes_before_the_headline(driver: Driver) -> None:
    screen = driver.screen(Terminal)
    driver.headline = "train on 2 ranks, 00:01"
    driver.tick(after=2.0)
    driver.bar("50%")
    assert on_screen(screen.getvalue()) == ["[0] 50%"]
    driver.write((0, "stderr", b"\n"))
    driver.tick(after=1.0)
    assert on_screen(screen.getvalue()) == ["[0] 50%", "train on 2 ranks, 00:01"]


def test_a_headline_that_was_reported_is_a_line_now_and_then_in_a_file(driver: Driver) -> None:
    driver.headline = "nobody has told anything"
    driver.tick(after=100.0)
    assert driver.err() == ""
    driver.reported, driver.headline = True, "train: 50%"
    driver.tick()
    driver.tick(after=29.0)
    driver.headline = "train: 75%"
    driver.tick(after=2.0)
    driver.headline = "train: 100%"
    driver.close()
    assert driver.err() == "train: 50%\ntrain: 75%\ntrain: 100%\n"


def test_the_last_headline_stays_where_it_was_reported(driver: Driver) -> None:
    screen = driver.screen(Terminal)
    driver.reported, driver.headline = True, "train: 50%"
    driver.tick(after=2.0)
    driver.headline = "train: 100%"
    driver.close()
    assert on_screen(screen.getvalue()) == ["train: 100%", ""]


def test_a_notebooks_headline_is_one_display_and_no_line(driver: Driver) -> None:
    screen = driver.screen(Notebook)
    driver.headline = "train: 50%"
    driver.tick(after=2.0)
    driver.tick()
    driver.reported, driver.headline = True, "train: 100%"
    driver.close()
    assert screen.getvalue() == ""
    assert driver.displays == [["train: 50%", "train: 100%"]]


def test_a_short_run_of_a_notebook_has_its_headline_as_a_line(driver: Driver) -> None:
    screen = driver.screen(Notebook)
    driver.reported, driver.headline = True, "train: 100%"
    driver.close()
    assert (screen.getvalue(), driver.displays) == ("train: 100%\n", [])


# One screen for all -------------------------------------------------------------------------------


def test_others_write_where_a_line_begins(driver: Driver) -> None:
    """The log of Spark's JVM, say, which nobody here can hold back."""
    screen = driver.screen(Terminal)
    driver.headline = "train, 00:06"
    driver.tick(after=2.0)
    screen.write("26/01/01 WARN TaskSetManager: Lost task\n")
    driver.headline = "train, 00:07"
    driver.tick(after=0.5)
    expected = ["26/01/01 WARN TaskSetManager: Lost task", "train, 00:07"]
    assert on_screen(screen.getvalue()) == expected


def test_two_runs_share_the_moving_line(driver: Driver) -> None:
    screen = driver.screen(Terminal)
    other = Console(
        lambda rank: True, status=lambda: "second", clock=driver.clock, screen=driver.shared
    )
    driver.headline = "first"
    driver.tick(after=2.0)
    with driver.here():
        other.tick()
        other.write(0, "stdout", b"a line\n")
    assert on_screen(screen.getvalue()) == ["[0] a line", "first | second"]
    driver.close()
    with driver.here():
        other.close()
    assert on_screen(screen.getvalue()) == ["[0] a line", ""]


def test_a_message_stands_above_the_moving_line(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributor.launch.output.messages.SCREEN", driver.shared)
    screen = driver.screen(Terminal)
    driver.headline = "train, 00:06"
    driver.tick(after=2.0)
    with driver.here():
        notify("Waiting")
        handler = logging.StreamHandler(screen)
        logging.getLogger("distributor").addHandler(handler)
        try:
            warn("a warning")
        finally:
            logging.getLogger("distributor").removeHandler(handler)
    driver.tick()
    assert on_screen(screen.getvalue()) == ["Waiting", "a warning", "train, 00:06"]


@pytest.mark.parametrize("kind", [Terminal, Notebook])
def test_a_line_in_two_parts_stays_one(driver: Driver, kind: type[io.StringIO]) -> None:
    screen = driver.screen(kind)
    driver.write((0, "stdout", b"validating... "))
    driver.tick(after=1.5)
    assert screen.getvalue().endswith("[0] validating... ")
    driver.write((0, "stdout", b"still... "))
    driver.tick(after=1.5)
    driver.write((0, "stdout", b"done\nnext\n"))
    driver.tick()
    assert screen.getvalue().splitlines() == ["[0] validating... still... done", "[0] next"]


@pytest.mark.parametrize("kind", [Terminal, Notebook])
def test_what_comes_between_ends_an_unfinished_line(
    driver: Driver, kind: type[io.StringIO]
) -> None:
    screen = driver.screen(kind)
    driver.write((0, "stdout", b"validating... "))
    driver.tick(after=1.5)
    with driver.here():
        driver.shared.print_message("a message")
    driver.write((0, "stdout", b"done\n"))
    driver.tick(after=1)
    assert screen.getvalue().splitlines() == ["[0] validating... ", "a message", "[0] done"]


def test_a_headline_waits_for_an_unfinished_line(driver: Driver) -> None:
    screen = driver.screen(Terminal)
    driver.headline = "train, 00:02"
    driver.tick(after=2.0)
    driver.write((0, "stdout", b"validating... "))
    driver.tick(after=1.5)
    assert on_screen(screen.getvalue()) == ["[0] validating..."]
    driver.write((0, "stdout", b"done\n"))
    driver.tick()
    assert on_screen(screen.getvalue()) == ["[0] validating... done", "train, 00:02"]


def test_a_file_shows_a_line_in_two_parts_as_one(driver: Driver) -> None:
    driver.write((0, "stdout", b"validating... "))
    driver.tick(after=5.0)
    driver.write((0, "stdout", b"done\n"))
    assert driver.out() == "[0] validating... done\n"


def test_runs_are_labelled_while_there_are_several() -> None:
    with RunLabel("train") as first:
        assert first.prefix(3) == "[3] "
        with RunLabel("train") as second, RunLabel("score") as third:
            prefixes = [label.prefix(3) for label in (first, second, third)]
            assert prefixes == ["[train 3] ", "[train#2 3] ", "[score 3] "]
    with RunLabel("train") as alone:
        assert alone.prefix(0) == "[0] "


NOUNS = [
    (counted(1, "rank"), "1 rank"),
    (counted(0, "rank"), "0 ranks"),
    (counted(2, "entry", "entries"), "2 entries"),
    (listed("rank", [3]), "rank 3"),
    (listed("rank", [0, 3]), "ranks 0, 3"),
    (RunProgress().line("train", 1).rpartition(",")[0], "train on 1 rank, 0 up"),
    (str(FailedAttempt(0, 1, KeyError("lost"))), "attempt 0 on 1 rank: KeyError: 'lost'"),
]


@pytest.mark.parametrize(("found", "expected"), NOUNS)
def test_nouns_agree_with_their_numbers(found: str, expected: str) -> None:
    assert found == expected


def test_no_message_leaves_the_plural_to_its_reader() -> None:
    sources = Path(distributor.__file__).parent.rglob("*.py")
    text = {path.name: re.findall(r"\w+\(s\)", path.read_text()) for path in sources}
    assert {name: found for name, found in text.items() if found} == {}


# Words of the driver's own ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "handled", "logged"),
    [
        (logging.NOTSET, False, False),
        (logging.INFO, False, False),
        (logging.WARNING, True, False),
        (logging.INFO, True, True),
        (logging.DEBUG, True, True),
    ],
)
def test_notify(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, level: int, handled: bool, logged: bool
) -> None:
    log, logger = io.StringIO(), logging.getLogger("distributor")
    monkeypatch.setattr(logger, "propagate", False)  # to the handlers that pytest gives the root
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logger.level)  # for these two to be restored
    monkeypatch.setattr(logger, "_cache", {})
    logger.setLevel(level)
    if handled:
        handler = logging.StreamHandler(log)
        handler.setFormatter(logging.Formatter("%(levelname)s %(filename)s %(message)s"))
        logger.addHandler(handler)
    before = (logger.level, list(logger.handlers), logger.propagate, logging.root.level)
    with driver.here():
        notify("Started 100% of 2 processes")
    assert driver.err() == ("" if logged else "Started 100% of 2 processes\n")
    record = "INFO test_console.py Started 100% of 2 processes\n"
    assert log.getvalue() == (record if logged else "")
    assert (logger.level, logger.handlers, logger.propagate, logging.root.level) == before


def test_warn(warned: Callable[[], list[str]]) -> None:
    warn("The link is 50% down")
    assert warned() == ["The link is 50% down"]
