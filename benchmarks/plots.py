"""Plots of the results as SVG, if matplotlib is installed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import launch, scale, values
from benchmarks.packages import library
from benchmarks.report import load
from benchmarks.spark import EMBEDDED, LOCAL

OURS, OTHERS, FLOORS = "#1a7f5a", "#7a8ca3", "#c9cfd6"
FAINT = 0.55
LINE_HEIGHT = 0.045
"""Of a small text, as a part of the axes' height."""
Rows = Sequence[dict[str, Any]]


def draw(folder: Path, name: str) -> None:
    """Draw the plot of a benchmark, if it has one, from the file of results."""
    if name not in _DRAWN:
        return
    try:
        pyplot = library("matplotlib.pyplot")
    except ImportError as error:
        print(f"no plot: {error}", file=sys.stderr)
        return
    pyplot.switch_backend("svg")
    # Without these, the same figures would produce a different file each time.
    library("matplotlib").rcParams["svg.hashsalt"] = name
    figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    if _DRAWN[name](axes, load(folder)[name]["rows"]):
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    pyplot.close(figure)


def _launch(axes: Any, rows: Rows) -> bool:
    case = launch.titled(LOCAL, launch.RANKS)
    first = _medians(rows, case, launch.FIRST)
    later = _medians(rows, case, launch.LATER)
    peers = sorted(first, key=lambda peer: later[peer])
    for place, peer in enumerate(peers):
        colour = _colour(peer)
        axes.barh(place - 0.2, first[peer], 0.38, color=colour, alpha=FAINT)
        axes.barh(place + 0.2, later[peer], 0.38, color=colour)
        for offset, seconds in ((-0.2, first[peer]), (0.2, later[peer])):
            axes.text(seconds * 1.05, place + offset, f"{seconds:.2g} s", va="center", fontsize=7)
    axes.set_yticks(range(len(peers)), [_titles(rows)[peer] for peer in peers], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.set_xlabel("seconds: a driver's first run (faint) and its later ones")
    axes.set_title(f"{launch.RANKS} ranks rendezvous, reduce and exit", fontsize=10)
    return bool(peers)


def _values(axes: Any, rows: Rows) -> bool:
    return _lines(axes, rows, values.VALUES, values.VALUE_ALONE, "a value from rank 0")


def _arguments(axes: Any, rows: Rows) -> bool:
    return _lines(axes, rows, values.ARGUMENTS, values.ARGUMENTS_ALONE, "arguments to two ranks")


def _lines(axes: Any, rows: Rows, sizes: Sequence[int], what: str, title: str) -> bool:
    series: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for size in sizes:
        if size < values.SMALL:
            continue  # the difference of two runs is mostly noise there
        for place in (LOCAL, EMBEDDED):
            for peer, seconds in _medians(rows, values.titled(place, size), what).items():
                if seconds > 0 and not (peer.startswith("floor") and place != LOCAL):
                    series.setdefault((peer, place), []).append((size, seconds))
    for (peer, place), points in series.items():
        style = "-" if place == LOCAL else "--"
        label = _titles(rows)[peer] + ("" if place == LOCAL else ", through Spark")
        axes.plot(*zip(*points, strict=True), style, marker="o", label=label)
    _loglog(axes, "MB", "seconds beyond a run without", title)
    return bool(series)


def _scale(axes: Any, rows: Rows) -> bool:
    drawn = False
    for peer, style in (("ours", "-"), ("floor_sockets", ":")):
        for what in (scale.RENDEZVOUSED, scale.RELEASED, scale.BUSY):
            points = [
                (nodes, found[peer])
                for nodes in scale.NODES
                if peer in (found := _medians(rows, scale.titled(nodes), what))
            ]
            if points:
                label = f"{_titles(rows)[peer]}: {what}"
                axes.plot(*zip(*points, strict=True), style, marker="o", label=label)
                drawn = True
    _loglog(axes, "simulated nodes", "seconds", "the driver's part of a cluster run")
    return drawn


def _loglog(axes: Any, x: str, y: str, title: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    _label_curves(axes)


def _label_curves(axes: Any) -> None:
    """Write the name of each curve beside its end, right of the axes, one below the other."""
    curves = sorted(axes.lines, key=lambda curve: curve.get_ydata()[-1])
    ends = [(curve.get_xdata()[-1], curve.get_ydata()[-1]) for curve in curves]
    in_axes = axes.transData + axes.transAxes.inverted()
    heights = [in_axes.transform(end)[1] for end in ends]
    for curve, end, height in zip(curves, ends, _apart(heights), strict=True):
        axes.annotate(
            curve.get_label(),
            end,
            (1.04, height),
            textcoords="axes fraction",
            fontsize=7,
            color=curve.get_color(),
            va="center",
            arrowprops={"arrowstyle": "-", "color": curve.get_color(), "lw": 0.5, "shrinkB": 4},
        )


def _apart(heights: Sequence[float]) -> list[float]:
    """Move ascending heights from 0 to 1 so far apart that lines of text do not overlap."""
    found: list[float] = []
    for height in heights:
        found.append(max(height, found[-1] + LINE_HEIGHT if found else 0.0))
    top = 1.0
    for place in reversed(range(len(found))):
        found[place] = min(found[place], top)
        top = found[place] - LINE_HEIGHT
    return found


def _medians(rows: Rows, case: str, what: str) -> dict[str, float]:
    return {
        row["peer"]: row["median"]
        for row in rows
        if (row["case"], row["what"]) == (case, what) and row["median"] is not None
    }


def _titles(rows: Rows) -> dict[str, str]:
    return {row["peer"]: re.sub("^floor: ", "", row["title"]) for row in rows}


def _colour(peer: str) -> str:
    if peer.startswith("floor"):
        return FLOORS
    return OURS if peer.startswith("ours") else OTHERS


_DRAWN: dict[str, Callable[[Any, Rows], bool]] = {
    "launch": _launch,
    "values": _values,
    "arguments": _arguments,
    "scale": _scale,
}
