"""The ranks' output line by line: prefixes, cuts at any byte, encodings and broken streams."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any, TextIO

import pytest
from support.driver_output import Chunk, DriverOutput, Notebook, Terminal, on_screen

from distributor.screen.console import Console
from distributor.screen.messages import notify


@pytest.fixture
def driver() -> DriverOutput:
    return DriverOutput()


@pytest.mark.parametrize(
    ("screen", "variables", "expected"),
    [
        (Terminal, {}, "\x1b[35m[3] \x1b[0mloss\n"),
        (Terminal, {"NO_COLOR": "1"}, "[3] loss\n"),
        (Terminal, {"TERM": "dumb"}, "[3] loss\n"),
        (io.StringIO, {}, "[3] loss\n"),
    ],
)
def test_a_terminal_shows_each_rank_in_a_color(
    monkeypatch: pytest.MonkeyPatch, screen: Any, variables: dict[str, str], expected: str
) -> None:
    for name, value in {"NO_COLOR": "", "TERM": "xterm", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", out := screen())
    console = Console(lambda rank: True)
    console.write(3, "stdout", b"loss\n")
    console.close()
    assert out.getvalue() == expected


MIB = 2**20


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
    "Windows line ends": ([(0, "stdout", b"a\r\nb\r\n\r\nc\r\n")], "[0] a\n[0] b\n[0] \n[0] c\n"),
    "a line end in two": ([(0, "stdout", b"a\r"), (0, "stdout", b"\nb\n")], "[0] a\n[0] b\n"),
    "a line end with two returns": ([(0, "stdout", b"a\r\r\nb\n")], "[0] a\n[0] b\n"),
    "two returns in two": ([(0, "stdout", b"a\r"), (0, "stdout", b"\r\nb\n")], "[0] a\n[0] b\n"),
    "colours": ([(0, "stdout", b"\x1b[31mred\x1b[0m\n")], "[0] \x1b[31mred\x1b[0m\n"),
}


@pytest.mark.parametrize(("chunks", "expected"), LINES.values(), ids=LINES)
def test_lines(driver: DriverOutput, chunks: list[Chunk], expected: str) -> None:
    driver.write(*chunks)
    driver.close()
    assert driver.out() == expected


def test_close_shows_the_rest_once_by_rank(driver: DriverOutput) -> None:
    driver.write((1, "stdout", b"one"), (0, "stdout", b"zero"))
    driver.close()
    driver.close()
    assert driver.out() == "[0] zero\n[1] one\n"


def test_stdout_and_stderr_are_kept_apart(driver: DriverOutput) -> None:
    driver.write((0, "stdout", b"out\n"), (0, "stderr", b"err\n"))
    assert (driver.out(), driver.err()) == ("[0] out\n", "[0] err\n")


def test_each_write_uses_the_current_streams(
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


NASTY = (
    "ä\n€uro\r\n\n\r\nplain 🙂 line\r\r\nlast\n".encode() + b"\xff\xe2\x82\n\xc3\r\ntail \xf0\x9f"
)
NASTY_BARS = "start\n\r 1%\r 20% ü\r\n\r1\r22\r333 \x1b[K\r\n\r4%\r     \rdone\nrest".encode()


def every_cut(data: bytes) -> Iterator[list[bytes]]:
    yield [data]
    yield [data[i : i + 1] for i in range(len(data))]
    for i in range(1, len(data)):
        yield [data[:i], data[i:]]


def test_cuts_do_not_change_lines(driver: DriverOutput) -> None:
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
def test_cuts_do_not_change_a_screen(driver: DriverOutput, kind: type[io.StringIO]) -> None:
    for chunks in every_cut(NASTY_BARS):
        screen = driver.screen(kind)
        driver.write(*((0, "stderr", chunk) for chunk in chunks))
        driver.close()
        expected = ["[0] start", "[0]  20% ü", "[0] 333", "[0] done", "[0] rest", ""]
        assert on_screen(screen.getvalue()) == expected, chunks


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("ascii", rb"[0] \xe4 \u20ac"),
        ("latin-1", b"[0] \xe4 \\u20ac"),
        ("cp1252", b"[0] \xe4 \x80"),
    ],
)
def test_narrow_encodings(driver: DriverOutput, encoding: str, expected: bytes) -> None:
    log = io.BytesIO()
    driver.streams(io.TextIOWrapper(log, encoding), None)
    driver.write((0, "stdout", "ä €\n".encode()), (0, "stdout", b"plain\n"))
    assert log.getvalue() == expected + b"\n[0] plain\n"


class Broken(io.StringIO):
    """A stream that fails, and counts the attempts to write."""

    def __init__(self, error: Exception, *, tty: bool) -> None:
        super().__init__()
        self.error, self.tty, self.attempts = error, tty, 0

    def isatty(self) -> bool:
        return self.tty

    def write(self, text: str, /) -> int:
        self.attempts += 1
        raise self.error


@pytest.mark.parametrize("tty", [False, True])
@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "full"), RuntimeError("odd")])
def test_a_broken_stream_is_not_used_again(
    driver: DriverOutput, error: Exception, tty: bool
) -> None:
    broken = Broken(error, tty=tty)
    driver.streams(broken, io.StringIO())
    driver.write((0, "stdout", b"a\n"), (0, "stdout", b"\rbar"), (0, "stdout", b"b\n"))
    driver.write((0, "stderr", b"still here\n"))
    assert broken.attempts == 1
    assert driver.err() == "[0] still here\n"
    driver.streams(io.StringIO(), None)
    driver.write((0, "stdout", b"a new stream\n"))
    assert driver.out() == "[0] a new stream\n"


def closed() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("gone", [None, closed(), object()], ids=["None", "closed", "no stream"])
def test_missing_streams_do_not_raise(driver: DriverOutput, gone: Any) -> None:
    driver.streams(gone, gone)
    driver.write((0, "stdout", b"a\n"), (0, "stderr", b"\rb"), (0, "stderr", b"c"))
    driver.tick()
    driver.close()
    with driver.here():
        notify("hello")
    driver.streams(io.StringIO(), None)
    driver.write((0, "stdout", b"here again\n"))
    assert driver.out() == "[0] here again\n"


def test_a_long_line_is_shown_whole(driver: DriverOutput) -> None:
    """Even if it takes seconds to arrive: it is too long for a prompt."""
    line = b"0123456789abcdef" * (MIB // 8)
    for start in range(0, len(line), MIB // 16):
        driver.write((0, "stdout", line[start : start + MIB // 16]), (1, "stdout", b"x\n"))
        driver.tick(after=0.5)
    driver.write((0, "stdout", b"\n"))
    assert driver.out().replace("[1] x\n", "") == f"[0] {line.decode()}\n"


@pytest.mark.parametrize("start", [b"", b"\r"], ids=["line", "bar"])
@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_long_line_in_small_pieces(
    driver: DriverOutput, kind: type[io.StringIO], start: bytes
) -> None:
    """Joining the pieces at each write would copy a quarter of a terabyte."""
    screen = driver.screen(kind)
    chunks = [start, *[b"x" * 50] * 100_000, b"\n"]
    driver.write(*((0, "stdout", chunk) for chunk in chunks))
    assert screen.getvalue().endswith("[0] " + "x" * 5_000_000 + "\n")


def test_a_prompt_is_shown(driver: DriverOutput) -> None:
    driver.write((0, "stdout", b"Continue? "))
    driver.tick(after=9.9)
    assert driver.out() == ""
    driver.tick(after=0.2)
    driver.tick()
    assert driver.out() == "[0] Continue? \n"
    driver.write((0, "stdout", b"yes\nnext\n"))
    assert driver.out() == "[0] Continue? \n[0] yes\n[0] next\n"


@pytest.mark.parametrize("end", [[b"\n"], [b"\r\n"], [b"\r", b"\n"], [b"", b"\n"]])
def test_the_newline_of_a_prompt_is_not_an_empty_line(
    driver: DriverOutput, end: list[bytes]
) -> None:
    driver.write((0, "stdout", b"loading..."))
    driver.tick(after=15)
    driver.write(*((0, "stdout", piece) for piece in end), (0, "stdout", b"\nnext\n"))
    assert driver.out() == "[0] loading...\n[0] \n[0] next\n"


def test_another_write_shows_a_prompt(driver: DriverOutput) -> None:
    driver.write((0, "stdout", b"Continue? "))
    driver.clock.now += 15
    driver.write((1, "stderr", b"x\n"))
    assert driver.out() == "[0] Continue? \n"


def test_dots_are_shown_while_the_line_grows(driver: DriverOutput) -> None:
    driver.write((0, "stdout", b"a long line " * 1000), (0, "stdout", b"\n"))
    driver.streams(io.StringIO(), None)
    for _ in range(6):
        driver.write((0, "stdout", b"."))
        driver.tick(after=5)
    assert driver.out() == "[0] ..\n" * 3


def test_a_late_end_completes_the_line(driver: DriverOutput) -> None:
    driver.write((0, "stdout", b"hel"))
    driver.clock.now += 5
    driver.write((0, "stdout", b"lo\n"))
    assert driver.out() == "[0] hello\n"


def test_a_file_shows_a_line_in_two_parts_as_one(driver: DriverOutput) -> None:
    driver.write((0, "stdout", b"validating... "))
    driver.tick(after=5.0)
    driver.write((0, "stdout", b"done\n"))
    assert driver.out() == "[0] validating... done\n"


def test_all_ranks_are_looked_at_a_few_times_a_second_at_most(driver: DriverOutput) -> None:
    """It takes longer the more ranks there are, and is asked for after each message."""
    assert driver.console.tick()
    assert not driver.console.tick()
    driver.clock.now += 0.2
    driver.write((0, "stdout", b"a line\n"))
    assert not driver.console.tick()
