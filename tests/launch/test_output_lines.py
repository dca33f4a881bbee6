"""The ranks' output line by line: prefixes, cuts at any byte, encodings and broken streams."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from support.driver_output import Chunk, DriverOutput, Notebook, Terminal, on_screen


@pytest.fixture
def driver() -> DriverOutput:
    return DriverOutput()


LINES: dict[str, tuple[list[Chunk], str]] = {
    "many in a chunk": ([(0, "stdout", b"a\nb\n\nc\n")], "[0] a\n[0] b\n[0] \n[0] c\n"),
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
    "colours": ([(0, "stdout", b"\x1b[31mred\x1b[0m\n")], "[0] \x1b[31mred\x1b[0m\n"),
}


@pytest.mark.parametrize(("chunks", "expected"), LINES.values(), ids=LINES)
def test_lines(driver: DriverOutput, chunks: list[Chunk], expected: str) -> None:
    driver.write(*chunks)
    driver.close()
    assert driver.out() == expected


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


class Broken(io.StringIO):
    """A stream that fails, and counts the attempts to write."""

    attempts = 0

    def write(self, text: str, /) -> int:
        self.attempts += 1
        raise BrokenPipeError


def test_a_broken_stream_is_not_used_again(driver: DriverOutput) -> None:
    broken = Broken()
    driver.streams(broken, io.StringIO())
    driver.write((0, "stdout", b"a\n"), (0, "stdout", b"\rbar"), (0, "stdout", b"b\n"))
    driver.write((0, "stderr", b"still here\n"))
    assert broken.attempts == 1
    assert driver.err() == "[0] still here\n"
    driver.streams(io.StringIO(), None)
    driver.write((0, "stdout", b"a new stream\n"))
    assert driver.out() == "[0] a new stream\n"


def test_a_long_line_in_small_pieces(driver: DriverOutput) -> None:
    """Joining the pieces at each write would copy 22 GB."""
    screen = driver.screen(Terminal)
    chunks = [b"\r", *[b"x" * 50] * 30_000, b"\n"]
    driver.write(*((0, "stdout", chunk) for chunk in chunks))
    assert screen.getvalue().endswith("[0] " + "x" * 1_500_000 + "\n")


def test_a_prompt_is_shown(driver: DriverOutput) -> None:
    driver.write((0, "stdout", b"Continue? "))
    driver.tick(after=9.9)
    assert driver.out() == ""
    driver.tick(after=0.2)
    driver.tick()
    assert driver.out() == "[0] Continue? \n"
    driver.write((0, "stdout", b"yes\nnext\n"))
    assert driver.out() == "[0] Continue? \n[0] yes\n[0] next\n"
