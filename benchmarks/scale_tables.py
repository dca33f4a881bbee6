"""The tables of SCALE.md, from the file of results."""

from __future__ import annotations

from typing import Any

from benchmarks import scale
from benchmarks.summary import figure, markdown

SHOWN_NODES = scale.NODES[-2:]
PEERS = {"ours": "", "floor_sockets": "plain sockets: "}


def growth_table(results: dict[str, Any]) -> str:
    """Lay out the figures of a run of many simulated nodes, and how they grow."""
    rows = _by_place(results)
    growth = scale.growth_title(scale.FIT_FROM, scale.NODES[-1])
    columns = [*map(scale.titled, SHOWN_NODES), growth]
    printing = [scale.printing_title(nodes, scale.LINES) for nodes in SHOWN_NODES]
    lines = [
        (prefix + what, *(figure(rows.get((peer, case, what))) for case in columns))
        for peer, prefix in PEERS.items()
        for what in scale.MEASURED
    ]
    lines += [
        (
            f"each prints {scale.LINES} lines: {what}",
            *(_figure(rows, case, what) for case in printing),
            "",
        )
        for what in scale.MEASURED
    ]
    return markdown(("", *columns), lines)


def descriptor_table(results: dict[str, Any]) -> str:
    """Lay out what happens to nodes if the driver may have few descriptors."""
    rows = _by_place(results)
    cases = [scale.limited_title(nodes, scale.USUAL_DESCRIPTORS) for nodes in SHOWN_NODES]
    lines = [
        (what, *(_figure(rows, case, what) for case in cases))
        for what in (scale.UNLINKED, scale.THROUGH_SPARK, scale.RENDEZVOUSED)
    ]
    return markdown(("", *cases), lines)


def _figure(rows: dict[tuple[str, str, str], dict[str, Any]], case: str, what: str) -> str:
    return figure(rows.get(("ours", case, what)))


def _by_place(results: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, Any]]:
    found = results["scale"]["rows"]
    return {(row["peer"], row["case"], row["what"]): row for row in found}
