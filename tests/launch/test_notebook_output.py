"""The ranks' output in a notebook: few blocks, without what moves."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support.driver_output import DriverOutput, Notebook, on_screen

from distributor.wire.messages import Stream


@pytest.fixture
def driver() -> DriverOutput:
    return DriverOutput()


def blocks(puts: list[Stream]) -> list[Stream]:
    """Return a cell's outputs: a new one for each change of stream."""
    return [stream for stream, _ in itertools.groupby(puts)]


class Cell(Notebook):
    """A stream of a notebook that records the order of writes."""

    __module__ = "ipykernel.iostream"

    def __init__(self, name: Stream, puts: list[Stream]) -> None:
        super().__init__()
        self.name, self.puts = name, puts

    def write(self, text: str, /) -> int:
        self.puts.append(self.name)
        return super().write(text)


def test_a_notebooks_streams_are_few_blocks(driver: DriverOutput) -> None:
    """Two ranks print to both streams once a second, for five minutes."""
    puts: list[Stream] = []
    driver.streams(Cell("stdout", puts), Cell("stderr", puts))
    for second in range(300):
        driver.status = f"train on 2 ranks, {second}"
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


def test_a_notebook_is_written_to_in_few_pieces(driver: DriverOutput) -> None:
    puts: list[Stream] = []
    driver.streams(Cell("stdout", puts), Cell("stderr", puts))
    driver.write(*[(rank % 8, "stdout", b"line\n") for rank in range(800)])
    driver.tick()
    assert len(puts) <= 2
    assert len(driver.out().splitlines()) == 800


IN_A_CELL = """
from distributor.screen.console import Console
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

    def collect(message: dict[str, Any]) -> None:
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
    assert "\x1b" not in outputs["stderr"]
