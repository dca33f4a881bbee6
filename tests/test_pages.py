"""The programs of the documentation run as they are printed, and print what the pages say.

The blocks of a page run in order, as one program. A block that is followed by a block of text
prints that text, in which `…` stands for what differs. Otherwise its `print` lines print the
comments behind them.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from support.pages import ROOT, Block, pages, python_blocks

PROGRAMS = {page: blocks for page in pages() if (blocks := python_blocks(page))}
COMMENT = re.compile(r"^print\(.*\)  # (.*)$", re.MULTILINE)
WARNS = frozenset[str]()
"""The pages whose programs show warnings of this package on purpose."""


def differing(block: Block, printed: str) -> str:
    """Return what a block should have printed, and has not; empty if nothing."""
    if block.printed:
        pattern = re.escape(block.printed.strip()).replace("…", ".*")
        return "" if re.fullmatch(pattern, printed.strip(), re.DOTALL) else block.printed
    lines = iter(printed.splitlines())
    return "\n".join(line for line in COMMENT.findall(block.source) if line not in lines)


@pytest.mark.spark
@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_programs_of_a_page_run(
    page: Path,
    spark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # for storage
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__", "spark": spark}
    for block in PROGRAMS[page]:
        # The lines of the page, also in tracebacks.
        source = "\n" * (block.line - 1) + block.source
        exec(compile(source, str(page), "exec"), names)
        printed = capsys.readouterr().out
        assert not differing(block, printed), f"line {block.line} printed:\n{printed}"
    if str(page.relative_to(ROOT)) not in WARNS:
        ours = [each for each in caplog.records if each.name.startswith("distributor")]
        assert [each.getMessage() for each in ours if each.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    ("text", "printed", "missing"),
    [
        ("```python\nprint(1)\n```\n\n```text\n1 … 3\n```\n", "1 2 3\n", ""),
        ("```python\nprint(1)\n```\n\nprints\n\n```text\n1\n```\n", "2\n", "1\n"),
        ("```python\nprint(f())  # 1\nprint(g())  # 2\n```\n", "[0] begun\n1\n2\n", ""),
        ("```python\nprint(f())  # 1\nprint(g())  # 2\n```\n", "2\n1\n", "2"),
    ],
)
def test_what_differs_is_found(tmp_path: Path, text: str, printed: str, missing: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    [block] = python_blocks(page)
    assert (block.line, differing(block, printed)) == (2, missing)
