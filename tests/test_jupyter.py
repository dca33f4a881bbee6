"""Runs from the cells of a real Jupyter kernel."""

from __future__ import annotations

import asyncio
import itertools
import operator
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import needs_java
from support.kernels import kernel_for
from support.waiting import DEADLINE, assert_gone, comes_true

from distributor.core.text import plain

pytest.importorskip("ipykernel")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytestmark = pytest.mark.slow(ci=True)

DEFINITIONS = """
import operator, os
from distributor import TorchDistributor

class Trained:
    def __init__(self, rank, score):
        self.rank, self.score = rank, score

class Broken(Exception):
    pass

double = lambda number: 2 * number

def train(number):
    print("training on", os.environ["RANK"])
    return Trained(int(os.environ["RANK"]), double(number))

two_ranks = TorchDistributor(2, use_gpu=False, timeout=120)
"""


class Notebook:
    """A kernel and its notebook, to which each `run` adds a cell."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._messages: list[Any] = []
        process = client.process_message

        def noted(message: Any, *args: Any) -> Any:
            self._messages.append(message)
            return process(message, *args)

        client.process_message = noted

    def run(self, source: str, *, may_fail: bool = False) -> Cell:
        """Run one more cell, and raise its error."""
        cells = self._client.nb.cells
        tags = {"tags": ["raises-exception"]} if may_fail else {}
        cells.append(nbformat.v4.new_code_cell(source.strip(), metadata=tags))
        self._messages.clear()
        cell = self._client.execute_cell(cells[-1], len(cells) - 1)
        return Cell(cell, [*self._messages])

    def interrupt(self) -> None:
        """Do what the stop button does. Thread-safe."""
        asyncio.run(self._client.km.interrupt_kernel())


class Cell:
    """The outputs below a cell that has run."""

    def __init__(self, cell: Any, messages: Sequence[Any]) -> None:
        self._outputs = cell.outputs
        self._messages = messages

    @property
    def blocks(self) -> list[tuple[str, str]]:
        """The outputs as a front end shows them: it appends to the last one of the same stream.

        Each is a stream's name, or "display_data", and its text.
        """
        shown = []
        for message in self._messages:
            content = message["content"]
            if message["msg_type"] == "stream":
                shown.append((content["name"], content["text"]))
            elif message["msg_type"] == "display_data":
                shown.append(("display_data", content["data"]["text/plain"]))
        return [
            (name, "".join(text for _, text in texts))
            for name, texts in itertools.groupby(shown, key=operator.itemgetter(0))
        ]

    def lines(self, stream: str) -> list[str]:
        """The lines of one stream, as carriage returns leave them."""
        texts = [output.text for output in self._outputs if output.get("name") == stream]
        return "".join(texts).splitlines()

    @property
    def pages(self) -> list[str]:
        """The HTML that is shown below the cell."""
        data = [output.data for output in self._outputs if output.output_type == "display_data"]
        return [each["text/html"] for each in data]

    @property
    def error(self) -> list[str]:
        """The lines of the cell's error, without colors."""
        [output] = [output for output in self._outputs if output.output_type == "error"]
        return [plain(line) for line in "\n".join(output.traceback).splitlines()]

    @property
    def value(self) -> str:
        """The cell's last expression, as text."""
        return next(
            output.data["text/plain"]
            for output in self._outputs
            if output.output_type == "execute_result"
        )


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A kernel of this interpreter, independent of this machine's Jupyter configuration."""
    with kernel_for(nbformat.v4.new_notebook(), tmp_path_factory.mktemp("jupyter")) as client:
        opened = Notebook(client)
        opened.run(DEFINITIONS)
        yield opened


def test_a_class_a_function_and_a_lambda_of_the_notebook(notebook: Notebook) -> None:
    cell = notebook.run("""
found = two_ranks.run(train, 21)
isinstance(found, Trained), found.rank, found.score
    """)
    assert cell.value == "(True, 0, 42)"
    assert sorted(cell.lines("stdout")) == ["[0] training on 0", "[1] training on 1"]
    assert cell.lines("stderr") == []
    [page] = cell.pages
    assert "<strong>train</strong>" in page
    for text in ("finished", "duration", "2 ranks on 1 host", "Started local training with 2"):
        assert text in page


def interrupt(notebook: Notebook, ranks: str, folder: Path) -> Cell:
    """Press the stop button while two ranks hang, and check that they have ended."""

    def press_when_both_run() -> None:
        comes_true(lambda: len(list(folder.iterdir())) == 2, DEADLINE)
        notebook.interrupt()

    threading.Thread(target=press_when_both_run, daemon=True).start()
    cell = notebook.run(
        f"""
def hang():
    import pathlib, threading
    pathlib.Path({str(folder)!r}, str(os.getpid())).touch()
    threading.Event().wait()

{ranks}.run(hang)
        """,
        may_fail=True,
    )
    pids = [int(path.name) for path in folder.iterdir()]
    assert len(pids) == 2
    assert_gone(pids)
    return cell


def test_the_stop_button_ends_the_ranks(notebook: Notebook, tmp_path: Path) -> None:
    cell = interrupt(notebook, "two_ranks", tmp_path)
    assert cell.error == ["KeyboardInterrupt: the run of hang has ended, and no rank is left"]
    assert cell.lines("stderr") == []
    [page] = cell.pages
    assert "stopped" in page
    assert notebook.run("two_ranks.run(train, 1).score").value == "2"


def frames(cell: Cell) -> list[str]:
    """Return the places of a traceback, the line that failed last."""
    return [line for line in cell.error if re.match(r"(Cell In|File )", line)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("two_ranks.run(divide, 0)", "ZeroDivisionError: division by zero"),
        ("TorchDistributor(2, nproc=3)", "TypeError: "),
        ('two_ranks.run("missing.py")', "FileNotFoundError: "),
        ("two_ranks.submit(divide, 0).result()", "ZeroDivisionError: division by zero"),
        ("distributed(gpus=2, use_gpu=False)(divide).distributed(0)", "ZeroDivisionError: "),
    ],
)
def test_a_failed_cell_ends_at_the_users_line(notebook: Notebook, line: str, message: str) -> None:
    cell = notebook.run(
        f"""
from distributor import distributed

def divide(divisor):
    return 1 / divisor

{line}
        """,
        may_fail=True,
    )
    assert any(each.startswith(message) for each in cell.error)
    assert [frame.partition("[")[0] for frame in frames(cell)] == ["Cell In"]
    [shown] = [each for each in cell.error if each.startswith("----> ")]
    assert shown.endswith(line)
    if "ZeroDivisionError" in message:
        assert re.search(r"^  Cell In\[\d+\], line 4, in divide$", "\n".join(cell.error), re.M)
    assert not [each for each in cell.error if "ipykernel" in each]
    assert cell.lines("stderr") == []


def test_a_run_that_takes_a_while_makes_few_outputs(notebook: Notebook) -> None:
    """Two ranks print from time to time, while the block is updated."""
    cell = notebook.run("""
def print_from_time_to_time():
    import time
    for step in range(10):
        print("step", step)
        time.sleep(0.4)

two_ranks.run(print_from_time_to_time)
    """)
    assert [kind for kind, _ in cell.blocks] == ["display_data", "stdout"]
    assert cell.blocks[0][1] == "print_from_time_to_time: waiting"
    steps = cell.lines("stdout")
    assert [line for line in steps if line.startswith("[0]")] == [
        f"[0] step {n}" for n in range(10)
    ]


@pytest.mark.spark
@needs_java
def test_a_cluster_from_a_cell(notebook: Notebook, tmp_path: Path) -> None:
    """The definitions of cells reach Spark's Python workers; a local Spark's are apart as well."""
    notebook.run("""
from pyspark.sql import SparkSession
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "true")
    .getOrCreate()
)
on_cluster = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=120)
    """)
    cell = notebook.run("""
found = on_cluster.run(train, 4)
isinstance(found, Trained), found.rank, found.score
    """)
    raised = notebook.run("on_cluster.run(operator.truediv, 1, 0)", may_fail=True)
    stopped = interrupt(notebook, "on_cluster", tmp_path)
    notebook.run("spark.stop()")

    assert cell.value == "(True, 0, 8)"
    ranks = [line for line in cell.lines("stdout") if re.match(r"\[\d\] ", line)]
    assert sorted(ranks) == ["[0] training on 0", "[1] training on 1"]
    assert len(frames(raised)) == 1
    assert any(line.startswith("ZeroDivisionError: ") for line in raised.error)
    assert stopped.error == ["KeyboardInterrupt: the run of hang has ended, and no rank is left"]
    cells = (cell, raised, stopped)
    assert [each.lines("stderr") for each in cells] == [[]] * 3
