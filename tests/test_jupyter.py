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
from conftest import DEADLINE, needs_java
from support.kernels import kernel_for
from support.waiting import assert_gone, comes_true

from distributor.core.text import plain

pytest.importorskip("ipykernel")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")

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


def test_each_cell_shows_its_own_ranks(notebook: Notebook) -> None:
    first = notebook.run('two_ranks.run(lambda: print("first"))')
    second = notebook.run('two_ranks.run(lambda: print("second"))')

    assert sorted(first.lines("stdout")) == ["[0] first", "[1] first"]
    assert sorted(second.lines("stdout")) == ["[0] second", "[1] second"]


def test_an_exception_of_the_notebook_and_its_line(notebook: Notebook) -> None:
    cell = notebook.run("""
import traceback

def fail():
    raise Broken("no", os.environ["RANK"])  # this very line

try:
    two_ranks.run(fail)
except Broken as error:
    caught = error
    shown = "".join(traceback.format_exception(error))
print(caught.args == ("no", str(next(iter(caught.rank_failures)))), shown.count("# this very line"))
    """)
    assert cell.lines("stdout") == ["True 1"]
    assert "# this very line" not in "".join(cell.lines("stderr")), "only the error shows it"


def test_a_rank_reads_the_source_of_a_cell(notebook: Notebook) -> None:
    cell = notebook.run("""
def read_sources():
    import inspect
    return inspect.getsource(read_sources) + inspect.getsource(train)

print(two_ranks.run(read_sources))
    """)
    lines = cell.lines("stdout")
    assert lines[:2] == ["def read_sources():", "    import inspect"]
    assert lines[3:5] == ["def train(number):", '    print("training on", os.environ["RANK"])']


def test_a_progress_bar_ends_as_one_line(notebook: Notebook) -> None:
    cell = notebook.run("""
def with_bar():
    import sys, time
    for step in range(11):
        sys.stderr.write(f"\\r{10 * step:3d}%|{'#' * step:10}| {step}/10")
        sys.stderr.flush()
        time.sleep(0.06)
    sys.stderr.write("\\n")
    print("over")

TorchDistributor(1, use_gpu=False).run(with_bar)
    """)
    bars = [line.rstrip() for line in cell.lines("stderr") if "/10" in line]
    assert bars == ["[0] 100%|##########| 10/10"]
    assert cell.lines("stdout") == ["[0] over"]


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
        ("TorchDistributor(0)", "ValueError: "),
        ("TorchDistributor(2, local_mode=False)", "RuntimeError: "),
        ('two_ranks.run("missing.py")', "FileNotFoundError: "),
        ("two_ranks.run(divide)", "TypeError: "),
        ("two_ranks.run(divide, __import__('threading').Lock())", "UnpicklableError: "),
        ("two_ranks.submit(divide, 0).result()", "ZeroDivisionError: division by zero"),
        ("TorchDistributor(2, nproc=3)", "TypeError: "),
        ("TorchTrainer(divide, scaling_config=ScalingConfig(num_workers=-1))", "ValueError: "),
        ("distributed(gpus=2, use_gpu=False)(divide).distributed(0)", "ZeroDivisionError: "),
    ],
)
def test_a_failed_cell_ends_at_the_users_line(notebook: Notebook, line: str, message: str) -> None:
    cell = notebook.run(
        f"""
from distributor import distributed
from distributor.train import ScalingConfig
from distributor.train.torch import TorchTrainer

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
        assert re.search(r"^  Cell In\[\d+\], line 6, in divide$", "\n".join(cell.error), re.M)
    assert not [each for each in cell.error if "ipykernel" in each]
    assert cell.lines("stderr") == []


def test_stacks_name_the_cell(notebook: Notebook) -> None:
    cell = notebook.run(
        """
def hang():
    import threading
    threading.Event().wait()

TorchDistributor(1, use_gpu=False, timeout=1).run(hang)
        """,
        may_fail=True,
    )
    text = "\n".join(cell.error)
    assert re.search(r"rank 0: in wait, called by hang \(Cell In\[\d+\]:3\)$", text, re.M), text
    assert re.search(r"^  Cell In\[\d+\], line 3 in hang$", text, re.M)
    assert "ipykernel" not in text


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


def test_two_runs_at_once_have_labels(notebook: Notebook) -> None:
    cell = notebook.run("""
import pathlib, tempfile, time
folder = pathlib.Path(tempfile.mkdtemp())

def one(name="one"):
    (folder / f"{name}{os.environ['RANK']}").touch()
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)  # until both runs are active
    print("done")

def other():
    return one("other")

runs = [two_ranks.submit(one), two_ranks.submit(other)]
[run.result() for run in runs]
    """)
    assert sorted(cell.lines("stdout")) == [
        f"[{name} {rank}] done" for name in ("one", "other") for rank in range(2)
    ]


def test_a_run_shows_its_id_and_log_folder(notebook: Notebook, tmp_path: Path) -> None:
    cell = notebook.run(f"""
def run_id():
    return os.environ["TORCHELASTIC_RUN_ID"]

TorchDistributor(1, use_gpu=False, log_dir={str(tmp_path)!r}).run(run_id)
    """)
    [folder] = tmp_path.iterdir()
    assert cell.value == repr(folder.name)
    [page] = cell.pages
    assert f"Run {folder.name} of run_id; logs in {folder}" in page


@pytest.mark.slow(ci=True)
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
slow = spark.range(0, 8_000_000, 1, 4).selectExpr("sha2(string(id), 512) AS hash")
slow = slow.where("hash LIKE '0000%'")
on_cluster = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=120)
    """)
    cell = notebook.run("""
found = on_cluster.run(train, 4)
isinstance(found, Trained), found.rank, found.score
    """)
    with_rows = notebook.run("""
import time
on_cluster.run(lambda rows: (time.sleep(1), print("has rows")), slow)
    """)
    failed = notebook.run('on_cluster.run(train, "text", 1)', may_fail=True)
    raised = notebook.run("on_cluster.run(operator.truediv, 1, 0)", may_fail=True)
    stopped = interrupt(notebook, "on_cluster", tmp_path)
    after = notebook.run("on_cluster.run(train, 1).score")
    notebook.run("spark.stop()")

    assert cell.value == "(True, 0, 8)"
    ranks = [line for line in cell.lines("stdout") if re.match(r"\[\d\] ", line)]
    assert sorted(ranks) == ["[0] training on 0", "[1] training on 1"]
    assert [len(frames(each)) for each in (failed, raised)] == [1, 1]
    assert any(line.startswith("ZeroDivisionError: ") for line in raised.error)
    assert stopped.error == ["KeyboardInterrupt: the run of hang has ended, and no rank is left"]
    assert after.value == "2"
    assert sorted(with_rows.lines("stdout")) == ["[0] has rows", "[1] has rows"]
    cells = (cell, with_rows, failed, raised, stopped, after)
    assert [each.lines("stderr") for each in cells] == [[]] * 6, "no progress bar of Spark either"
