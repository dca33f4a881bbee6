"""A run as plain data, read from its event log: what the page and ``--json`` show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from distributor.rank.step_clock import GPU_STRIDE, Counters
from distributor.report.account import BUCKETS, LOST, WORK, Account, RankAccount
from distributor.report.event_log import is_being_written, read_log
from distributor.report.verdict import recent_verdict_of, verdict_of

NUM_BINS, MAX_ROWS = 200, 64
"""Bins of the timeline at most, and ranks in it and in the page's table."""
MAX_POINTS, MAX_METRICS = 400, 12
"""Points of a curve, and metrics, at most."""
LARGEST = 1e200
"""The values of a curve are smaller, so that sums of them are finite."""


def read_summary(path: Path) -> dict[str, Any]:
    """Return a run as plain data.

    Parameters
    ----------
    path : Path
        Its event log.

    Raises
    ------
    LogError
        If the file is no event log, or one of a newer version, or cannot be read.
    """
    timeline, curves = Timeline(), Curves()
    account = Account(timeline.add, timeline.lose)
    for event in read_log(path):
        account.add(event)
        curves.add(event, account)
    timeline.began = account.began
    verdict = verdict_of(account)
    ranks = [_rank(account, number, rank) for number, rank in sorted(account.ranks.items())]
    first = {failure["rank"] for failure in account.failures} | {verdict.rank}
    if account.ended is None and not is_being_written(path):
        account.state = "lost"
        if account.attempts and account.attempts[-1]["state"] == "running":
            account.attempts[-1]["state"] = "stopped"
    return {
        "version": 1,
        **{name: account.facts.get(name) for name in ("run", "name", "user", "host")},
        "state": account.state,
        "error": account.error,
        "began": account.began,
        "ended": account.ended,
        "seconds": round(account.duration, 3),
        "goodput": account.goodput,
        "verdict": verdict._asdict(),
        "recent": recent._asdict() if (recent := recent_verdict_of(account)) else None,
        "unseen": list(_unseen(account)),
        "attempts": account.attempts,
        "ranks": ranks,
        "timeline": timeline.data(account.began, _shown(ranks, first)),
        **curves.data(),
        "failures": account.failures,
        "stalls": account.stalls,
        "preemptions": account.preemptions,
        **{name: account.facts.get(name) for name in ("settings", "versions", "where", "logs")},
        "log": str(path),
    }


def _unseen(account: Account) -> Iterable[str]:
    if account.facts.get("step_times") is False:
        yield "Where the time of ranks went is not known: step_times is off."
        return
    ranks = [rank for rank in account.ranks.values() if rank.use.steps]
    if not ranks:
        yield "No step of an optimizer of torch was seen, so all time of the ranks is compute."
    elif not all(rank.use.models for rank in ranks) and len(ranks) > 1:
        yield (
            "Waiting for other ranks is in compute: the model is not wrapped in "
            "DistributedDataParallel, of which alone it is known."
        )
    if any(rank.use.gpu >= 0 for rank in ranks):
        yield (
            "On GPUs, time is that of the process: kernels run later than they are started, so a "
            "wait may be in the next bucket. Waiting for other ranks is measured in one step of "
            f"{GPU_STRIDE}."
        )


def _rank(account: Account, number: int, rank: RankAccount) -> dict[str, Any]:
    seconds, use = account.seconds_of(rank), rank.use
    return {
        "rank": number,
        "host": rank.host,
        "state": rank.state if account.state != "lost" else "stopped",
        "steps": int(use.steps),
        "seconds": {name: round(each, 3) for name, each in zip(BUCKETS, seconds, strict=True)},
        "step_cpu": use.step_cpu / use.steps if use.steps else None,
        "hooks": use.hooks / use.steps if use.steps else None,
        "cpu": use.cpu / use.alive if use.alive else None,
        "memory": use.memory or None,
        "gpu": use.gpu if use.gpu >= 0 else None,
        "gpu_memory": use.gpu_memory if use.gpu_memory >= 0 else None,
    }


class Timeline:
    """The buckets of each rank over time, in bins that become wider as the run lasts."""

    def __init__(self) -> None:
        self.began: float | None = None
        self._width = 0.05
        self._bins: dict[int, list[list[float]]] = {}

    def add(self, rank: int, begin: float, end: float, seconds: Sequence[float]) -> None:
        """Add a segment of a rank's time."""
        if end <= begin:
            return
        if self.began is None:
            self.began = begin
        while end - self.began > self._width * NUM_BINS:
            self._widen()
        bins = self._bins.setdefault(rank, [])
        rates = [(bucket, each / (end - begin)) for bucket, each in enumerate(seconds) if each]
        for index in range(self._index(begin), self._index(end) + 1):
            while len(bins) <= index:
                bins.append([0.0] * len(BUCKETS))
            left = self.began + index * self._width
            overlap = min(end, left + self._width) - max(begin, left)
            if overlap > 0:
                for bucket, rate in rates:
                    bins[index][bucket] += rate * overlap

    def lose(self, begin: float, end: float) -> None:
        """Put the work of all ranks between two moments into the bucket of lost work."""
        if self.began is None:
            return
        for bins in self._bins.values():
            for index, sums in enumerate(bins):
                left = self.began + index * self._width
                overlap = min(end, left + self._width) - max(begin, left)
                if overlap > 0:
                    for bucket in WORK:
                        lost = sums[bucket] * min(1.0, overlap / self._width)
                        sums[bucket] -= lost
                        sums[LOST] += lost

    def data(self, began: float, ranks: Sequence[int]) -> dict[str, Any]:
        """Return the timeline of some ranks of a run that began then as plain data."""
        bins = ((rank, self._bins.get(rank, ())) for rank in ranks)
        rows = [
            {"rank": rank, "bins": [_shares(sums, self._width) for sums in each]}
            for rank, each in bins
        ]
        return {"began": began, "width": self._width, "rows": rows}

    def _index(self, at: float) -> int:
        assert self.began is not None
        return min(max(0, int((at - self.began) / self._width)), NUM_BINS)

    def _widen(self) -> None:
        self._width *= 2
        for rank, bins in self._bins.items():
            odd = bins[1::2] + [[0.0] * len(BUCKETS)] * (len(bins) % 2)
            pairs = zip(bins[::2], odd, strict=True)
            self._bins[rank] = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]


def _shares(sums: Sequence[float], width: float) -> list[float]:
    pairs = [(code, round(each / width, 3)) for code, each in enumerate(sums)]
    return [figure for pair in pairs if pair[1] > 0 for figure in pair]


def _shown(ranks: Sequence[Mapping[str, Any]], first: Set[int | None]) -> list[int]:
    """Return the ranks; of too many, first some and then those that differ most from the mean."""
    if len(ranks) <= MAX_ROWS:
        return [rank["rank"] for rank in ranks]
    mean = {name: statistics.fmean(rank["seconds"][name] for rank in ranks) for name in BUCKETS}

    def difference(rank: Mapping[str, Any]) -> float:
        return math.fsum(abs(rank["seconds"][name] - mean[name]) for name in BUCKETS)

    order = sorted(ranks, key=lambda rank: (rank["rank"] not in first, -difference(rank)))
    return sorted(rank["rank"] for rank in order[:MAX_ROWS])


class Curves:
    """Throughput, metrics, use and checkpoints over time."""

    def __init__(self) -> None:
        self._throughput = Curve()
        self._use = {name: Curve() for name in ("cpu", "memory", "gpu", "gpu_memory")}
        self._begin_attempt()
        self._metrics: dict[str, Curve] = {}
        self._checkpoints: list[dict[str, Any]] = []

    def add(self, event: Mapping[str, Any], account: Account) -> None:
        """Add an event to the curves that it belongs to."""
        at, kind = event["at"] - account.began, event.get("event")
        if kind == "attempt":
            self._begin_attempt()
        elif kind == "use":
            window = account.recent[-1]  # of this event
            self._add_use(at, {rank: u for rank, u in window.rows.items() if u.alive}, account)
        elif kind in ("progress", "report"):
            self._add_metrics(at, event["metrics"])
            if event.get("checkpoint"):
                self._checkpoints.append(
                    {"at": event["at"], "path": event["checkpoint"]}
                    | {name: event.get(name) for name in ("seconds", "number")}
                )

    def _begin_attempt(self) -> None:
        self._latest: dict[int, Counters] = {}  # of each rank
        self._steps = self._seconds = 0.0  # of all ranks, since the latest point of throughput

    def _add_use(self, at: float, rows: Mapping[int, Counters], account: Account) -> None:
        """Add rows of the ranks that were sampled in this window, which may be a part of them."""
        for number, row in rows.items():
            if (rank := account.ranks.get(number)) and rank.attempt_steps:
                self._steps += row.steps
                self._seconds += row.alive
        if self._steps:
            self._throughput.add(at, self._steps / self._seconds)
            self._steps = self._seconds = 0.0
        # The last row of a process has no CPU time: it has ended.
        self._latest |= {number: row for number, row in rows.items() if row.cpu}
        latest = self._latest.values()
        if not rows or not account.attempts or len(latest) < account.attempts[-1]["ranks"]:
            return
        self._use["cpu"].add(at, sum(row.cpu / row.alive for row in latest))
        self._use["memory"].add(at, sum(row.memory for row in latest))
        if gpus := [row for row in latest if row.gpu >= 0]:
            self._use["gpu"].add(at, sum(row.gpu for row in gpus) / len(gpus))
            self._use["gpu_memory"].add(at, sum(row.gpu_memory for row in gpus))

    def _add_metrics(self, at: float, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_number and (name in self._metrics or len(self._metrics) < MAX_METRICS):
                self._metrics.setdefault(name, Curve()).add(at, value)

    def data(self) -> dict[str, Any]:
        """Return the curves as plain data."""
        return {
            "throughput": self._throughput.points,
            "metrics": {name: curve.points for name, curve in self._metrics.items()},
            "use": {name: curve.points for name, curve in self._use.items() if curve.points},
            "checkpoints": self._checkpoints,
        }


class Curve:
    """Points of a curve, which are thinned to their means as they become too many."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._stride = 1
        self._pending: list[tuple[float, float]] = []

    def add(self, at: float, value: float) -> None:
        """Add a point. A value that is not finite, or too large to add up, is left out."""
        if not abs(value) < LARGEST:
            return
        self._pending.append((at, value))
        if len(self._pending) < self._stride:
            return
        self._points.append(_mean(self._pending))
        self._pending = []
        if len(self._points) >= MAX_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            self._points = [_mean(pair) for pair in pairs]
            self._stride *= 2

    @property
    def points(self) -> list[list[float]]:
        """The points, with the mean of those that wait for others."""
        rest = [_mean(self._pending)] if self._pending else []
        return [[round(at, 2), value] for at, value in [*self._points, *rest]]


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return (
        sum(at for at, _ in points) / len(points),
        sum(value for _, value in points) / len(points),
    )
