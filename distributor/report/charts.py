"""Charts of the page of a run, as plain SVG: no script, and text of one size at any width.

Text and lines are placed in percent; what has coordinates is in an inner SVG, which is stretched.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from distributor.core.text import duration
from distributor.report.account import BUCKETS

# Okabe and Ito's colors, which color-blind people can distinguish, and three grays.
STYLES = {
    "start": ("Start", "#8c8c8c"),
    "data": ("Data", "#e69f00"),
    "compute": ("Compute", "#009e73"),
    "wait": ("Waiting for other ranks, and communication", "#56b4e9"),
    "checkpoint": ("Checkpoint and report", "#cc79a7"),
    "lost": ("Lost work (steps done again)", "#d55e00"),
    "recovery": ("Recovery", "#f0e442"),
    "stall": ("Stall", "#0072b2"),
    "idle": ("Idle", "#c4c4c4"),
    "end": ("End", "#5c5c5c"),
}
"""The text and the color of each bucket."""
MARKS = {
    "checkpoints": ("Checkpoint", "M0-6 5 0 0 6-5 0z", "Checkpoint {number}"),
    "attempts": ("Beginning of an attempt", "M-4-6 6 0-4 6z", "Attempt {number}"),
    "preemptions": ("Preemption", "M-5-5H5V5H-5z", "Preemption of {hosts}"),
    "failures": ("Failure", "M-5-5 5 5M5-5-5 5", "Failure of rank {rank} on {host}: {summary}"),
}
"""The text, the shape and the tooltip of each kind of event on the timeline; later ones cover."""
MAX_DOTS = 40
"""Points of a curve that are drawn as dots too; of more, the line alone."""
PLACES = 150
"""Places for events of one kind on the timeline; those at one place share a mark."""
LEVELS, PITCH = 50, 58
"""Heights of a bucket in a row of the timeline, and the distance of two rows."""
STEPS = [
    *(digit * 10.0**power for power in range(-6, 1) for digit in (1, 2, 5)),
    *(15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200),
]
"""Seconds between two ticks of an axis of time that is shorter than days."""
_TIME = Markup('<text x="{:.2f}%" y="{}" text-anchor="{}">{}</text>')
_VALUE = Markup('<text x="-6" y="{:.1f}" text-anchor="end">{}</text>')
_GRID = Markup('<line class="grid" x2="100%" y1="{0:.1f}" y2="{0:.1f}"/>')
_LINE = Markup('<line class="{0}" x1="{1:.2f}%" x2="{1:.2f}%" y1="{2}" y2="{3}"/>')
_MARK = Markup(
    '<svg x="{:.2f}%" y="12" class="mark {}"><path d="{}"><title>{}</title></path></svg>'
)
_CHART = Markup(
    '<svg class="chart" role="img" height="140"><title>{}</title>{}<svg y="8" width="100%"'
    ' height="108" viewBox="0 0 1000 400" preserveAspectRatio="none"><path d="{}"/>'
    '<path class="dots" d="{}"/></svg></svg>'
)
_AREA = Markup('<path fill="{}" d="{}V{}z"/>')
_LABEL = Markup('<span class="{}">{}</span>')
_ROW = Markup('<g transform="translate(0 {})"><title>{}</title>{}</g>')
_TIMELINE = Markup(
    '<div class="timeline"><div class="labels" aria-hidden="true">{}</div><svg class="rows"'
    ' role="img" width="100%" height="{}"><title>Where the time of each rank went</title>'
    '<svg y="24" width="100%" height="{}" viewBox="0 0 {:.3f} {}" preserveAspectRatio="none">'
    "{}</svg>{}</svg></div>"
)


def run_seconds(summary: Mapping[str, Any]) -> float:
    """Return the seconds that the axes of time show."""
    return max(float(summary["seconds"]), 1e-6)


def line_chart(
    points: Sequence[Sequence[float]],
    title: str,
    seconds: float,
    starts: Sequence[float] = (),
    from_zero: bool = False,
) -> Markup:
    """Return a curve over time: pairs of seconds and values, interrupted at each of `starts`.

    The title is the curve in words. `from_zero` is whether the axis of values includes 0.
    """
    low, high = _limits([y for _, y in points], from_zero)
    path = dots = ""
    for _, part in itertools.groupby(points, lambda point: bisect.bisect(starts, point[0])):
        across = [(1000 * min(x / seconds, 1), 400 * (high - y) / (high - low)) for x, y in part]
        path += "M" + " ".join(f"{x:.0f} {y:.0f}" for x, y in across) + "h0"
        dots += "".join(f"M{x:.0f} {y:.0f}h0" for x, y in across)
    parts = [*_times(seconds, 4, 136)]
    for value, text in _ticks(low, high, 3):
        height = 8 + 108 * (high - value) / (high - low)
        parts += [_GRID.format(height), _VALUE.format(height + 4, text)]
    parts += [_LINE.format("attempts", 100 * start / seconds, 8, 116) for start in starts]
    return _CHART.format(title, Markup().join(parts), path, dots if len(points) <= MAX_DOTS else "")


def _limits(values: Iterable[float], from_zero: bool) -> tuple[float, float]:
    known = [*values, *([0.0] if from_zero else ())]
    low, high = min(known), max(known)
    if high - low > max(abs(low), abs(high), 1e-191) * 1e-9:
        return low, high
    room = abs(low) / 10 + 1e-9
    return (0.0, 1.0) if from_zero or not low else (low - room, high + room)


def _ticks(low: float, high: float, count: int) -> Iterator[tuple[float, str]]:
    """Return at most about `count` round numbers between two, and their texts."""
    least = (high - low) / count
    power = 10.0 ** math.floor(math.log10(least))
    step = next((n * power for n in (1, 2, 5) if least <= n * power), 10 * power)
    largest = max(abs(low), abs(high))
    digits, significant = -math.floor(math.log10(step)), 1 + math.floor(math.log10(largest / step))
    is_plain = digits < 4 and largest < 1e6
    for i in range(math.ceil(low / step), math.floor(high / step) + 1):
        value = i * step
        yield value, f"{value:,.{max(0, digits)}f}" if is_plain else f"{value:.{significant}g}"


def _times(seconds: float, count: int, height: float) -> Iterator[Markup]:
    """Return the texts of an axis of time, at a height."""
    days = 86400.0 * math.ceil(seconds / count / 86400)
    step = next((step for step in STEPS if seconds / step <= count), days)
    for i in range(math.floor(seconds / step) + 1):
        text = duration(float(f"{i * step:.9g}")).removesuffix(" 0 s").removesuffix(" 0 min")
        share = i * step / seconds
        anchor = "start" if i == 0 else "end" if share > 0.95 else "middle"
        yield _TIME.format(100 * share, height, anchor, text)


def timeline(summary: Mapping[str, Any]) -> Markup:
    """Return where the time of each rank went, and the events of the run, over time."""
    shown, seconds = summary["timeline"], run_seconds(summary)
    hosts = {rank["rank"]: rank["host"] for rank in summary["ranks"]}
    labels, rows = Markup(), Markup()
    for i, row in enumerate(shown["rows"]):
        rank, count = row["rank"], len(shown["rows"])
        labels += _LABEL.format("named" if rank == summary["verdict"]["rank"] else "", rank)
        title = f"Rank {rank} on {hosts[rank] or 'no host yet'}"
        rows += _ROW.format(PITCH * i, title, Markup().join(_areas(row["bins"])))
    height = count * min(30, max(16, 400 // count))
    bins = seconds / max(shown["width"], seconds / 1e6)
    around = Markup().join([*_marks(summary, seconds, height), *_times(seconds, 7, height + 44)])
    return _TIMELINE.format(labels, height + 50, height, bins, PITCH * count, rows, around)


def _areas(bins: Sequence[Sequence[float]]) -> Iterator[Markup]:
    """Return an area for each bucket of a row, the highest first: lower ones are drawn over it."""
    tops: list[dict[int, int]] = []
    for i, pairs in enumerate(bins, 1):
        sums = list(itertools.accumulate(pairs[1::2]))
        whole = sums[-1] if sums and i == len(bins) else 1.0  # the last may be partial
        levels = [round(LEVELS * min(each / whole, 1.0)) for each in sums]
        tops.append(dict(zip(map(int, pairs[::2]), levels, strict=True)))
    for code in sorted({code for top in tops for code in top}, reverse=True):
        path, before = f"M0 {LEVELS}", 0
        for level, equal in itertools.groupby(top.get(code, 0) for top in tops):
            path += f"v{before - level}h{len(list(equal))}"
            before = level
        yield _AREA.format(STYLES[BUCKETS[code]][1], path, LEVELS)


def _marks(summary: Mapping[str, Any], seconds: float, height: float) -> Iterator[Markup]:
    for kind, (_, shape, pattern) in MARKS.items():
        places: dict[int, list[str]] = {}
        # The first attempt begins with the run.
        for event in summary[kind][1 if kind == "attempts" else 0 :]:
            at = event.get("at", event.get("began")) - summary["began"]
            text = pattern.format(**{**event, "hosts": ", ".join(event.get("hosts", ()))})
            place = round(PLACES * min(max(at / seconds, 0.0), 1.0))
            places.setdefault(place, []).append(f"{text}, after {duration(at)}")
        for place, texts in places.items():
            x, more = 100 * place / PLACES, [f"and {len(texts) - 3} more"] * (len(texts) > 3)
            yield _LINE.format(kind, x, 22, height + 28)
            yield _MARK.format(x, kind, shape, "\n".join(texts[:3] + more))
