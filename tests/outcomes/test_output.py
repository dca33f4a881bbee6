"""All that ranks print is shown and logged, over both launchers."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from conftest import cluster_is_slow
from support.ranks import (
    MIB,
    Distribute,
    failures_of,
    my_rank,
    wait_to_be_stopped,
    wait_until,
)

from distributor import RunTimeout, TorchDistributor, WorkerDied
from distributor.control.controller import Controller
from distributor.control.run import Attempt, Launcher, Run
from distributor.node.node import Node
from distributor.programs import program_of
from distributor.run_spec import RunSpec
from distributor.torch_distributor import plan

cloudpickle.register_pickle_by_value(sys.modules[__name__])


LINES = 20_000
STATES = 500


def print_oddly(rank: int) -> None:
    """Print in every odd way; `odd_output` returns the bytes that result."""
    os.write(1, b"\xff\xfe not UTF-8\n")
    os.write(2, b"caf\xc3")
    os.write(2, b"\xa9, \xe2\x82 cut\n")
    for i in range(LINES):
        print(f"line {i} of rank {rank}")
    for i in range(STATES):
        print(f"\rstep {i + 1}/{STATES}", end="", file=sys.stderr)
    print(file=sys.stderr)
    print("windows\r")
    subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    sys.stdout.write("b" * (5 * MIB) + "\n")
    print("\udc80 surrogate")
    print("the whole of stderr", file=sys.stderr)
    atexit.register(print, "from an exit handler")
    ctypes.CDLL(None).printf(b"from C, without a newline")
    print("never flushed", end="; ")


def odd_output(rank: int) -> dict[str, bytes]:
    """Return the bytes that `print_oddly` writes to each stream."""
    lines = "".join(f"line {i} of rank {rank}\n" for i in range(LINES))
    states = "".join(f"\rstep {i + 1}/{STATES}" for i in range(STATES))
    stdout = [
        b"\xff\xfe not UTF-8\n",
        lines.encode(),
        b"windows\r\n",
        b"from a child\n",
        b"b" * (5 * MIB) + b"\n",
        b"\\udc80 surrogate\n",
        b"never flushed; from an exit handler\n",
        b"from C, without a newline",
    ]
    stderr = [
        b"caf\xc3\xa9, \xe2\x82 cut\n",
        states.encode() + b"\n",
        b"the whole of stderr\n",
    ]
    return {"stdout": b"".join(stdout), "stderr": b"".join(stderr)}


def shown_by(rank: int, text: str) -> list[str]:
    """Return the lines that a rank printed, from the driver's output, without their prefix."""
    prefix = f"[{rank}] "
    return [line.removeprefix(prefix) for line in text.split("\n") if line.startswith(prefix)]


def logged(log_dir: Path) -> dict[str, bytes]:
    """Read all files of the only run under a log folder."""
    (folder,) = log_dir.iterdir()
    return {path.name: path.read_bytes() for path in (folder / "attempt_0").iterdir()}


@cluster_is_slow
def test_odd_output_is_shown_and_logged(
    distribute: Distribute, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def program() -> str:
        print_oddly(my_rank())
        return os.environ["TORCHELASTIC_RUN_ID"]

    # If the driver's value were inherited, nothing would wait in a buffer.
    run_id = distribute(2, log_dir=tmp_path, env={"PYTHONUNBUFFERED": ""}).run(program)
    captured = capsys.readouterr()

    assert [path.name for path in tmp_path.iterdir()] == [run_id]
    files = logged(tmp_path)
    assert sorted(files) == ["rank0.stderr", "rank0.stdout", "rank1.stderr", "rank1.stdout"]
    for rank in range(2):
        expected = odd_output(rank)
        assert all(files[f"rank{rank}.{stream}"] == expected[stream] for stream in expected)

        text = expected["stdout"].decode(errors="backslashreplace").replace("\r\n", "\n")
        shown = shown_by(rank, captured.out)
        assert "".join(shown) == text.replace("\n", "")
        assert [line for line in shown if "bb" not in line] == [
            line for line in text.split("\n") if "bb" not in line
        ], "a line of millions of letters may be shown in parts"

        errors = shown_by(rank, captured.err)
        bars = [line for line in errors if line.startswith("step ")]
        assert [line for line in errors if line not in bars] == [
            "café, \\xe2\\x82 cut",
            "the whole of stderr",
        ]
        assert bars[-1] == f"step {STATES}/{STATES}"
        assert len(bars) < STATES / 2
    unprefixed = [line for line in captured.out.split("\n") if not re.match(r"\[[01]\] ", line)]
    assert unprefixed == [""]


@cluster_is_slow
def test_failed_run_logs_all_output_and_shows_the_selected_ranks(
    distribute: Distribute, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_dir, sign = tmp_path / "logs", tmp_path / "printed"

    def program() -> None:
        for i in range(3000):
            print(f"line {i}")
        print("warning", file=sys.stderr)
        if my_rank() == 0:
            sign.touch()
            wait_to_be_stopped()
        wait_until(sign.exists, "rank 0 has printed")
        raise OSError("the last message")

    with pytest.raises(OSError, match="the last message") as caught:
        distribute(2, log_dir=log_dir, show_output=[1]).run(program)
    captured = capsys.readouterr()

    assert list(failures_of(caught.value)) == [1]
    printed = b"".join(f"line {i}\n".encode() for i in range(3000))
    files = logged(log_dir)
    assert files["rank0.stdout"] == files["rank1.stdout"] == printed
    assert files["rank0.stderr"] == b"warning\n"
    assert files["rank1.stderr"].startswith(b"warning\n")
    assert files["rank1.stderr"].endswith(b"OSError: the last message\n")
    assert (shown_by(0, captured.out), shown_by(0, captured.err)) == ([], [])
    assert shown_by(1, captured.out) == printed.decode().splitlines()
    assert shown_by(1, captured.err) == ["warning"], "the error has the traceback"


@cluster_is_slow
def test_of_very_many_lines_none_is_lost_or_repeated(
    distribute: Distribute, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    many = 200_000

    def program() -> None:
        if my_rank() == 1:
            wait_to_be_stopped()
        for number in range(many):
            print("line", number)
            if number == many - many // 10:
                child = os.fork()
                if not child:
                    print("forked")
                    sys.stdout.flush()
                    os._exit(0)
                os.waitpid(child, 0)
        wait_until(lambda: sys.stdout.line_buffering, "each line is written by itself again")
        print("last line")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerDied, match="last line"):
        distribute(2, log_dir=tmp_path).run(program)
    expected = sorted([*(f"line {number}" for number in range(many)), "forked", "last line"])
    (log,) = tmp_path.glob("*/attempt_0/rank0.stdout")
    assert sorted(log.read_text().splitlines()) == expected
    assert sorted(shown_by(0, capfd.readouterr().out)) == expected


class CutShort:
    """A sink that ends the run once it receives "ready", as a timeout would."""

    def __init__(self) -> None:
        self.received = b""
        self.cut = False

    def write(self, rank: int, stream: str, data: bytes) -> None:
        if stream in ("stdout", "stderr"):
            self.received += data
        if not self.cut and b"ready" in self.received:
            self.cut = True
            raise RunTimeout("cut short")

    def tick(self) -> None:
        pass


def print_when_stopped() -> None:
    def print_and_exit(*_: object) -> None:
        os.write(1, b"l" * 2 * MIB + b"last line\n")
        os._exit(1)

    signal.signal(signal.SIGTERM, print_and_exit)
    print("ready")
    wait_to_be_stopped()


@pytest.mark.parametrize(
    ("distribute", "by"),
    [
        ("local", "driver"),
        ("local", "node"),
        pytest.param("cluster", "driver", marks=[pytest.mark.slow, pytest.mark.spark]),
    ],
    indirect=["distribute"],
)
def test_output_is_received_to_the_end_if_a_run_is_cut_short(
    distribute: Distribute, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    sink = CutShort()
    if by == "node":
        at_node, sink.cut, write = CutShort(), True, Node.write

        def write_and_check(node: Node, rank: int, source: Any, data: bytes) -> None:
            write(node, rank, source, data)
            at_node.write(rank, source, data)

        monkeypatch.setattr(Node, "write", write_and_check)
    with pytest.raises(RunTimeout, match="cut short"):
        launch(print_when_stopped, distribute(1), sink)
    assert sink.received.startswith(b"ready\n")
    assert sink.received.endswith(b"last line\n")
    assert len(sink.received) == len(b"ready\nlast line\n") + 2 * MIB


def launch(
    program: Callable[..., object], distributor: TorchDistributor, sink: Any, *args: object
) -> None:
    """Run a program on one rank, with a sink of the test's own."""
    spec = RunSpec(
        program=program_of(program, args, {}),
        num_processes=1,
        min_processes=1,
        settings=distributor,
    )
    attempt = Attempt(run=Run(spec=spec, launcher=Launcher()), num_ranks=1)
    deadline = time.monotonic() + 60
    with plan(distributor, 1, 1).launcher.start(attempt, deadline) as handle:
        Controller(attempt, handle, sink, deadline).follow()
