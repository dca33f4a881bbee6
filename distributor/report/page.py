"""The page of a run: one HTML file that needs nothing else, neither a script nor a server."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib import resources
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from distributor.core.text import counted, duration, linked, listed, plain, printable
from distributor.report import charts
from distributor.report.account import BUCKETS
from distributor.report.charts import STYLES, line_chart

if TYPE_CHECKING:
    from jinja2 import Template

LIMIT = 50
"""Failures, stalls, attempts and checkpoints that are shown, of each."""
LEAST = 5e-4
"""The share of a bucket from which on it is shown."""
USES = {
    "cpu": ("CPU, cores", 1.0),
    "memory": ("Memory, GB", 1e-3),
    "gpu": ("GPU, %", 1.0),
    "gpu_memory": ("GPU memory, GB", 1e-3),
}
"""What is used: its name with its unit, and the factor from that of the summary."""
COLUMNS = {"step_cpu": ("CPU seconds of a step", 1.0), **USES}
"""What the table of ranks has beside seconds."""
Seconds = dict[str, float]
Points = Sequence[Sequence[float]]


def render(summary: Mapping[str, Any]) -> str:
    """Return the page of a run.

    Parameters
    ----------
    summary : mapping
        What is known of the run, as ``distributor report --json`` prints it.

    Returns
    -------
    str
        An HTML document.
    """
    ranks, metrics, use = summary["ranks"], summary["metrics"], summary["use"]
    uses = {
        text: [(at, value * factor) for at, value in use.get(key, ())]
        for key, (text, factor) in USES.items()
    }
    named = {name: metrics[name] for name in sorted(metrics, key=lambda name: name != "loss")}
    shown = {row["rank"] for row in summary["timeline"]["rows"]}
    page = _template(summary["began"]).render(
        summary,
        summary=summary,
        charts=charts,
        limit=LIMIT,
        made=time.time(),
        num_hosts=len({rank["host"] for rank in ranks if rank["host"]}),
        shares=_shares([rank["seconds"] for rank in ranks]),
        rows=[rank for rank in ranks if rank["rank"] in shown],
        columns={key: column for key, column in COLUMNS.items() if any(r[key] for r in ranks)},
        curves=[
            *_curves(summary, {"Steps per second": summary["throughput"]}, True),
            *_curves(summary, named, False),
        ],
        uses=[*_curves(summary, uses, True)],
    )
    return printable(page)


def _template(began: float) -> Template:
    from jinja2 import Environment  # torch requires it

    environment = Environment(
        autoescape=True, finalize=_shown, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "after": lambda at: f"after {duration(at - began)}",
        "counted": counted,
        "elapsed": duration,
        "linked": lambda value: Markup(linked(str(_shown(value)))),
        "moment": _moment,
        "number": _number,
        "paragraph": lambda text: (text or "").partition("\n\n")[0],
        "percent": _percent,
        "repr": repr,
        "same": _same,
    }
    source = resources.files("distributor.report").joinpath("page.html")
    return environment.from_string(source.read_text(encoding="utf-8"))


def _shown(value: object) -> object:
    """Return a value as the page shows it: text without a terminal's control sequences."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return "" if value is None else value
    return "\n".join(plain(line) for line in value.expandtabs().split("\n"))


def _number(value: float) -> str:
    return f"{value:,.0f}" if 100 <= abs(value) < 1e9 else f"{value:.3g}"


def _percent(share: float) -> str:
    return "< 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def _moment(at: float) -> str:
    """Return the date and time of seconds since the epoch."""
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def _same(stacks: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the ranks that have the same stack, and the stack."""
    ranks: dict[str, list[int]] = {}
    for rank, stack in stacks.items():
        ranks.setdefault(stack, []).append(int(rank))
    return [(listed("Rank", sorted(found)), stack) for stack, found in ranks.items()]


def _shares(ranks: Sequence[Seconds]) -> list[tuple[str, float, float, str]]:
    """Return buckets that took time: the mean of ranks, its share of all time, and both in text."""
    means = {name: statistics.fmean(rank[name] for rank in ranks) for name in BUCKETS if ranks}
    whole = sum(means.values()) or 1.0
    parts = [(name, took, took / whole) for name, took in means.items() if took > LEAST * whole]
    return [
        (name, took, share, f"{STYLES[name][0]}: {_percent(share)}, {duration(took)}")
        for name, took, share in parts
    ]


def _curves(
    summary: Mapping[str, Any], series: Mapping[str, Points], from_zero: bool
) -> Iterator[tuple[str, str, Markup]]:
    """Return the name, some values and the chart of each series that has a value."""
    lines = [attempt["began"] - summary["began"] for attempt in summary["attempts"][1:]][:LIMIT]
    seconds = charts.run_seconds(summary)
    for name, points in series.items():
        if values := [value for _, value in points]:
            low, high, last = map(_number, (min(values), max(values), values[-1]))
            text = f"latest {last}, lowest {low}, highest {high}"
            yield name, text, line_chart(points, f"{name}: {text}", seconds, lines, from_zero)
