"""Progress bars of ranks: as lines of a file, on terminals and in notebooks."""

from __future__ import annotations

import contextlib
import fcntl
import io
import pty
import struct
import termios

import pytest
from support.driver_output import Chunk, DriverOutput, Notebook, Terminal, on_screen


@pytest.fixture
def driver() -> DriverOutput:
    return DriverOutput()


def test_a_file_gets_a_state_a_minute_and_the_last(driver: DriverOutput) -> None:
    driver.bar(*(f"{i / 100:.2f}%" for i in range(10_000)), every=0.0625)
    driver.write((0, "stderr", b"\r100%\n"))
    states = [f"[0] {i / 100:.2f}%" for i in range(0, 10_000, 960)]
    assert driver.err().splitlines() == [*states, "[0] 100%"]


def test_bars_one_after_the_other_share_the_rate(driver: DriverOutput) -> None:
    for epoch in range(3):
        driver.bar(*(f"{epoch}: {i}%" for i in range(0, 101, 10)), every=1)
        driver.write((0, "stderr", b"\n"))
    assert driver.err() == "[0] 0: 0%\n[0] 0: 100%\n[0] 1: 100%\n[0] 2: 100%\n"


UP = "\x1b[A"


def nested(epochs: int, steps: int, leave: str = "\r   \r") -> list[str]:
    """Return what nested loops with tqdm write, the inner bar below the outer one."""
    writes = [f"\repoch 0/{epochs}"]
    for epoch in range(epochs):
        writes += [f"\n\r{epoch}: step {step}{UP}" for step in range(steps)]
        writes += [f"\n{leave}{UP}", f"\repoch {epoch + 1}/{epochs}"]
    return [*writes, "\n"]


def test_nested_bars_have_a_line_a_minute_each(driver: DriverOutput) -> None:
    for text in nested(epochs=3, steps=50):
        driver.write((0, "stderr", text.encode()))
        driver.clock.now += 1
    driver.write((0, "stderr", b"done\n"))
    minutes = ["epoch 0/3", "epoch 1/3", "1: step 7", "epoch 2/3", "2: step 15"]
    assert driver.err().splitlines() == [f"[0] {line}" for line in [*minutes, "epoch 3/3", "done"]]


def test_cuts_do_not_change_nested_bars(driver: DriverOutput) -> None:
    text = "".join(nested(epochs=2, steps=2)) + "done\n" + "".join(nested(1, 1)) + "more\n"
    for at in range(len(text)):
        driver.streams(io.StringIO(), io.StringIO())
        driver.clock.now += 100
        driver.write((0, "stderr", text[:at].encode()), (0, "stderr", text[at:].encode()))
        lines = driver.err().splitlines()
        done = lines.index("[0] done")
        assert lines[done - 1] == "[0] epoch 2/2", at
        assert lines[-2:] == ["[0] epoch 1/1", "[0] more"], at
        assert UP not in driver.err(), at
        assert len(lines) <= 8, at


@pytest.mark.parametrize("moves", ["\x1b[A" * 10_000, "\x1b[99A" * 1000, f"\x1b[{'9' * 5000}A"])
def test_the_cursor_moves_up_without_bounds(driver: DriverOutput, moves: str) -> None:
    driver.write((0, "stderr", f"\r1%{moves}\n\r2%\nthe end\n".encode()))
    assert driver.err().splitlines()[-1] == "[0] the end"


def test_nested_bars_end_with_the_run(driver: DriverOutput) -> None:
    driver.write(*((0, "stderr", text.encode()) for text in nested(1, 2)[:3]))
    driver.close()
    assert driver.err().splitlines() == ["[0] epoch 0/1", "[0] 0: step 1"]


def test_nested_bars_move_on_a_terminal(driver: DriverOutput) -> None:
    screen = driver.screen(Terminal)
    for text in nested(2, 20)[:30]:
        driver.write((0, "stderr", text.encode()))
    assert on_screen(screen.getvalue()) == ["[0] epoch 0/2", "[0] 1: step 6"]


def test_each_rank_and_stream_has_its_own_rate(driver: DriverOutput) -> None:
    driver.bar("1%", "2%")
    driver.bar("1%", "2%", rank=1)
    driver.write((0, "stdout", b"\r1%"), (0, "stdout", b"\r2%"))
    assert (driver.out(), driver.err()) == ("[0] 1%\n", "[0] 1%\n[1] 1%\n")


def test_tick_shows_a_delayed_state(driver: DriverOutput) -> None:
    driver.bar("1%", "2%", "3%")
    driver.tick()
    assert driver.err() == "[0] 1%\n"
    driver.tick(after=60)
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
def test_bars_in_a_file(driver: DriverOutput, chunks: list[bytes], expected: list[str]) -> None:
    driver.write(*((0, "stderr", chunk) for chunk in chunks))
    driver.close()
    assert driver.err() == "".join(f"[0] {line}\n" for line in expected)


def test_a_bar_moves_on_a_terminal(driver: DriverOutput) -> None:
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
def test_bars_on_a_terminal(driver: DriverOutput, chunks: list[Chunk], expected: list[str]) -> None:
    screen = driver.screen(Terminal)
    driver.write(*chunks)
    driver.tick()
    assert on_screen(screen.getvalue()) == expected


@pytest.mark.parametrize(("chunks", "expected"), SCREENS.values(), ids=SCREENS)
def test_bars_in_a_notebook(driver: DriverOutput, chunks: list[Chunk], expected: list[str]) -> None:
    """They do not move: the block of the run has the last line of each rank."""
    screen = driver.screen(Notebook)
    driver.write(*chunks)
    driver.tick()
    assert screen.getvalue().splitlines() == expected[:-1]


@pytest.mark.parametrize("kind", [Terminal, Notebook])
def test_close_leaves_all_bars_as_lines(driver: DriverOutput, kind: type[io.StringIO]) -> None:
    screen = driver.screen(kind)
    driver.bar("1%", "2%", rank=1)
    driver.bar("3% and more", rank=0)
    driver.bar("   ", rank=2)
    driver.close()
    assert on_screen(screen.getvalue()) == ["[0] 3% and more", "[1] 2%", ""]


def test_a_prompt_is_above_a_bar(driver: DriverOutput) -> None:
    screen = driver.screen(Terminal)
    driver.write((1, "stdout", b"Continue? "))
    driver.bar("1%")
    driver.tick(after=2)
    assert on_screen(screen.getvalue()) == ["[1] Continue?", "[0] 1%"]


def test_a_file_beside_a_terminal_gets_no_sequences(driver: DriverOutput) -> None:
    driver.streams(io.StringIO(), Terminal())
    driver.bar("1%")
    drawn = driver.err()
    driver.write((0, "stdout", b"x\n"), (0, "stdout", b"\r5%"))
    assert driver.out() == "[0] x\n[0] 5%\n"
    assert driver.err() == drawn


def test_a_bar_is_not_drawn_after_the_stream_became_a_file(driver: DriverOutput) -> None:
    driver.screen(Terminal)
    driver.bar("1%")
    driver.streams(driver.stdout, io.StringIO())
    driver.write((0, "stdout", b"x\n"))
    driver.tick()
    assert driver.err() == ""


def test_a_real_terminal() -> None:
    """A pseudo-terminal of 20 columns, with progress bars of its width and wider."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    driver = DriverOutput()
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
    """Return all output to a terminal until its last writer has closed it."""
    data = b""
    with open(master, "rb", buffering=0) as terminal, contextlib.suppress(OSError):
        while more := terminal.read(65536):
            data += more
    return data.decode()
