"""The tables of benchmark results in the documentation.

Run as ``PYTHONPATH=.:tests python -m support.result_tables`` to rewrite them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import load
from benchmarks.scale_tables import descriptor_table, growth_table
from benchmarks.summary import highlights, summary
from support.pages import PAGES, ROOT, fill_section


class ResultTable(NamedTuple):
    """A table in a page, between ``<!-- name -->`` and ``<!-- end -->``."""

    page: Path
    name: str
    make: Callable[[dict[str, Any]], str]


TABLES = (
    ResultTable(ROOT / "README.md", "highlights", highlights),
    ResultTable(PAGES / "explanation" / "performance.md", "summary", summary),
    ResultTable(ROOT / "benchmarks" / "SCALE.md", "growth", growth_table),
    ResultTable(ROOT / "benchmarks" / "SCALE.md", "descriptors", descriptor_table),
)


if __name__ == "__main__":
    results = load(ROOT / "benchmarks" / "results")
    for table in TABLES:
        filled = fill_section(table.page.read_text(), table.name, table.make(results))
        table.page.write_text(filled)
