"""The programs of the documentation run as they are printed, and print what the pages say.

The blocks of a page run in order, as one program. A block that is followed by a block of text
prints that text, in which `…` stands for what differs. Otherwise its `print` lines print the
comments behind them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.pages import ROOT, differing, pages, python_blocks

pytestmark = pytest.mark.repository

ELSEWHERE = {
    "docs/how-to/connect.md": "tests/test_connect.py",
    "docs/how-to/deepspeed.md": "tests/test_deepspeed.py",
    "docs/how-to/dynamic-allocation.md": "tests/launch/test_dynamic_allocation.py",
}
"""Pages whose programs need another kind of session, or a compiler, and the tests that run them."""
OPTIONAL = {
    *("accelerate", "lightning", "mlflow", "optuna", "peft", "ray"),
    *("sklearn", "transformers", "trl"),
}
"""Packages without which a page is skipped."""
WARNS = {"docs/how-to/hangs.md", "docs/how-to/recovery.md", "docs/how-to/study.md"}
"""Pages whose programs show warnings of this package on purpose."""
LEAST_BLOCKS = 60
BLOCKS = {str(page.relative_to(ROOT)): python_blocks(page) for page in pages()}
SLOW = {
    "docs/how-to/estimator.md": pytest.mark.slow,
    "docs/how-to/fine-tune.md": pytest.mark.slow(ci=True),
    "docs/how-to/frameworks.md": pytest.mark.slow(ci=True),
}
"""Pages whose programs take minutes."""
RUN_HERE = [
    pytest.param(page, marks=SLOW.get(page, ()))
    for page, blocks in BLOCKS.items()
    if blocks and page not in ELSEWHERE
]
IMPORT = re.compile(r"^ *(?:import|from) (\w+)", re.MULTILINE)
WARNING_OF_A_RANK = re.compile(r"^\[.*\d\] distributor: .*", re.MULTILINE)


@pytest.fixture
def restored(spark: Any) -> Iterator[None]:
    """Restore what programs set in this process, and in the session that they share."""
    master = spark.conf.get("spark.master")
    with mock.patch.dict(os.environ):
        yield
        # A program that asks for a master gets this session, whose settings then have that master.
        spark._jsparkSession.sessionState().conf().setConfString("spark.master", master)
        if "mlflow" in sys.modules:
            sys.modules["mlflow"].set_tracking_uri(None)


@pytest.mark.spark
@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("page", RUN_HERE)
def test_the_programs_of_a_page_run(
    page: str,
    spark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    warned: Callable[[], list[str]],
) -> None:
    imported = {name for block in BLOCKS[page] for name in IMPORT.findall(block.source)}
    if missing := sorted(name for name in imported & OPTIONAL if find_spec(name) is None):
        pytest.skip(f"not installed: {', '.join(missing)}")
    monkeypatch.setenv("HOME", str(tmp_path))  # for storage
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # the latest run is one of the page
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__", "spark": spark}
    found: list[str] = []
    for block in BLOCKS[page]:
        # The lines of the page, also in tracebacks.
        source = "\n" * (block.line - 1) + block.source
        exec(compile(source, str(ROOT / page), "exec"), names)
        printed = capsys.readouterr().out
        assert not differing(block, printed), f"line {block.line} printed:\n{printed}"
        found += WARNING_OF_A_RANK.findall(printed)
    if page not in WARNS:
        assert found + warned() == []


def test_the_other_pages_run_elsewhere() -> None:
    for page, test in ELSEWHERE.items():
        assert BLOCKS[page], page
        assert Path(page).name in (ROOT / test).read_text()


def test_the_documentation_shows_programs() -> None:
    assert sum(map(len, BLOCKS.values())) >= LEAST_BLOCKS
