"""``PYTHONPATH=.:tests python -m support.result_tables`` rewrites the tables of results."""

from __future__ import annotations

from benchmarks.report import load
from benchmarks.scale_tables import descriptor_table, growth_table
from benchmarks.summary import highlights, summary
from support.pages import ROOT, fill_section

TABLES = {
    "highlights": ("README.md", highlights),
    "summary": ("docs/explanation/performance.md", summary),
    "growth": ("benchmarks/SCALE.md", growth_table),
    "descriptors": ("benchmarks/SCALE.md", descriptor_table),
}
"""The page and the maker of each table, which is between ``<!-- NAME -->`` and ``<!-- end -->``."""

if __name__ == "__main__":
    results = load(ROOT / "benchmarks" / "results")
    for name, (page, make) in TABLES.items():
        path = ROOT / page
        path.write_text(fill_section(path.read_text(), name, make(results)))
