"""The README's programs run as they are, and it stays a front page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.pages import ROOT, python_blocks

README = ROOT / "README.md"
BLOCKS = python_blocks(README)
MAX_LINES = 150
PRINTED = ["rank 0 of 2, lr 0.001", "[0, 1]", "{'loss': 1.0}", "[500, 500]"]
"""What each block prints last."""


def test_each_block_has_an_expected_output() -> None:
    assert len(BLOCKS) == len(PRINTED)


@pytest.mark.spark
def test_the_programs_run(
    spark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # for the trainer's storage
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__", "spark": spark}
    for block, printed in zip(BLOCKS, PRINTED, strict=True):
        exec(compile(block, str(README), "exec"), names)
        assert capsys.readouterr().out.splitlines()[-1] == printed


def test_it_is_short() -> None:
    assert len(README.read_text().splitlines()) <= MAX_LINES
