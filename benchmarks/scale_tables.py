"""The tables of SCALE.md, from the file of results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import scale
from benchmarks.summary import figure, markdown

SHOWN_NODES = scale.NODES[-2:]
PEERS = {"ours": "", "floor_sockets": "plain sockets: "}


def growth_table(results: dict[str, Any]) -> str:
    """Lay out the figures of a run of many simulated nodes, and how they grow."""
    figures = _figures(results)
    growth = scale.growth_title(scale.FIT_FROM, scale.NODES[-1])
    columns = [*map(scale.titled, SHOWN_NODES), growth]
    printing = [scale.printing_title(nodes, scale.LINES) for nodes in SHOWN_NODES]
    lines = [
        (prefix + what, *(figures[peer, case, what] for case in columns))
        for peer, prefix in PEERS.items()
        for what in scale.MEASURED
    ]
    lines += [
        (f"each prints {scale.LINES} lines: {what}", *_ours(figures, printing, what), "")
        for what in scale.MEASURED
    ]
    return markdown(("", *columns), lines)


def descriptor_table(results: dict[str, Any]) -> str:
    """Lay out what happens to nodes if the driver may have few descriptors."""
    figures = _figures(results)
    cases = [scale.limited_title(nodes, scale.USUAL_DESCRIPTORS) for nodes in SHOWN_NODES]
    measured = (scale.UNLINKED, scale.THROUGH_SPARK, scale.RENDEZVOUSED)
    return markdown(("", *cases), [(what, *_ours(figures, cases, what)) for what in measured])


def _figures(results: dict[str, Any]) -> dict[tuple[str, str, str], str]:
    """Return the figures by peer, case and what was measured."""
    rows = results["scale"]["rows"]
    return {(row["peer"], row["case"], row["what"]): figure(row) for row in rows}


def _ours(
    figures: dict[tuple[str, str, str], str], cases: Sequence[str], what: str
) -> Iterator[str]:
    return (figures["ours", case, what] for case in cases)
