"""Progress bars of ranks: as lines of a file, and on terminals."""

from __future__ import annotations

import pytest
from support.driver_output import Chunk, DriverOutput, Terminal, on_screen


@pytest.fixture
def driver() -> DriverOutput:
    return DriverOutput()


def test_a_file_gets_a_state_a_minute_and_the_last(driver: DriverOutput) -> None:
    driver.bar(*(f"{i / 100:.2f}%" for i in range(10_000)), every=0.0625)
    driver.write((0, "stderr", b"\r100%\n"))
    states = [f"[0] {i / 100:.2f}%" for i in range(0, 10_000, 960)]
    assert driver.err().splitlines() == [*states, "[0] 100%"]


BARS: dict[str, tuple[list[bytes], list[str]]] = {
    "the last state, at the newline": ([b"\r1%", b"\r2%", b"\r3%", b"\n"], ["1%", "3%"]),
    "the last state, at the end": ([b"\r1%", b"\r2%", b"\r3%"], ["1%", "3%"]),
    "the last state of each line in a chunk": ([b"\r1%\r2%\n\r7%\r8%\nx\n"], ["2%", "8%", "x"]),
    "a cleared bar": ([b"\r1%", b"\r    ", b"\r", b"\n"], ["1%"]),
    "a line after a cleared bar": ([b"\r1%", b"\r    \rdone\nnext\n"], ["1%", "done", "next"]),
    "colours stay, moves go": ([b"\r\x1b[?25l\x1b[32m1%\x1b[0m\x1b[A\n"], ["\x1b[32m1%\x1b[0m"]),
}


@pytest.mark.parametrize(("chunks", "expected"), BARS.values(), ids=BARS)
def test_bars_in_a_file(driver: DriverOutput, chunks: list[bytes], expected: list[str]) -> None:
    driver.write(*((0, "stderr", chunk) for chunk in chunks))
    driver.close()
    assert driver.err() == "".join(f"[0] {line}\n" for line in expected)


SCREENS: dict[str, tuple[list[Chunk], list[str]]] = {
    "lines go above": (
        [(0, "stderr", b"\r1%"), (1, "stdout", b"x\ny\n")],
        ["[1] x", "[1] y", "[0] 1%"],
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
    "a cleared bar goes": (
        [(0, "stderr", b"\r1%"), (0, "stderr", b"\r   \r"), (0, "stderr", b"\r")],
        [""],
    ),
    "another's cleared bar leaves it": (
        [(1, "stderr", b"\r1%"), (0, "stderr", b"\r2%"), (1, "stderr", b"\r   ")],
        ["[0] 2%"],
    ),
}


@pytest.mark.parametrize(("chunks", "expected"), SCREENS.values(), ids=SCREENS)
def test_bars_on_a_terminal(driver: DriverOutput, chunks: list[Chunk], expected: list[str]) -> None:
    screen = driver.screen(Terminal)
    driver.write(*chunks)
    driver.tick()
    assert on_screen(screen.getvalue()) == expected
