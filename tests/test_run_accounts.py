"""The account of a run's time, its log and its page, for runs that last hours: on virtual time."""

from __future__ import annotations

import fcntl
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.driver_output import Clock

from distributor.rank.messages import RanksUse
from distributor.rank.step_clock import NUM_REPORTED, Counters
from distributor.report.account import BUCKETS, Account
from distributor.report.event_log import EventLog, remove_oldest
from distributor.report.page import render
from distributor.report.run_events import RunEvents
from distributor.report.summary import MAX_POINTS, NUM_BINS, Curve, Timeline, read_summary
from distributor.report.verdict import recent_verdict_of, verdict_of

Events = list[dict[str, Any]]


def event(at: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"at": at, "event": kind, **fields}


def use(at: float, *rows: list[float]) -> dict[str, Any]:
    return event(at, "use", seconds=1.0, ranks=rows)


def worked(rank: int, seconds: float, first: float = 0.0, **shares: float) -> list[float]:
    """Return what a rank did in some seconds, of which there are these shares."""
    parts = {name: 1e3 * seconds * share for name, share in shares.items()}
    sums = Counters(alive=1e3 * seconds, steps=10 * seconds, first=1e3 * first)
    return [rank, 0.0, *sums._replace(**parts)[:NUM_REPORTED]]


def account_of(events: Events) -> Account:
    account = Account()
    for each in events:
        account.add(each)
    return account


ATTEMPTS = [
    event(0.0, "run", run="a"),
    event(1.0, "attempt", number=0, ranks=2),
    event(3.0, "started", ranks=[0, 1], host="here"),
    use(4.0, *(worked(rank, 2.0, 0.4, stepped=0.5, data=0.2, checkpoint=0.1) for rank in (0, 1))),
    event(5.0, "report", number=1, checkpoint="c", seconds=0.2, metrics={"loss": 0.5}),
    use(6.0, *(worked(rank, 2.0, stepped=0.8, data=0.2, waited=0.3) for rank in (0, 1))),
    event(6.5, "failure", attempt=0, rank=1, host="here", step=20, summary="lost", text=""),
    event(7.0, "attempt_ended", state="failed", error="lost", stalled=False),
    event(8.0, "attempt", number=1, ranks=1),
    event(8.5, "started", ranks=[0], host="here"),
    use(10.0, worked(0, 1.5, first=0.5, stepped=2 / 3)),
    event(11.0, "attempt_ended", state="finished", error=None, stalled=False),
    event(12.0, "end", state="finished", error=None),
]  # fmt: skip


def test_each_second_of_a_rank_is_in_one_bucket() -> None:
    account = account_of(ATTEMPTS)
    found = [dict(zip(BUCKETS, rank.seconds, strict=True)) for rank in account.ranks.values()]
    both = {"start": 2.4, "data": 0.6, "compute": 1.5, "wait": 0.3, "checkpoint": 0.2, "lost": 1}
    again = {"compute": 2.5, "recovery": 3.0, "stall": 0, "idle": 0, "end": 2.0}
    idle = {"recovery": 2.0, "stall": 0, "idle": 3.0, "end": 1.0}
    assert found == [pytest.approx(both | again), pytest.approx(both | idle)]


def test_a_log_that_lacks_a_line_can_be_read() -> None:
    """A full disk takes lines, also those of an attempt or of a start."""
    for left_out in range(1, len(ATTEMPTS)):
        account = account_of(ATTEMPTS[:left_out] + ATTEMPTS[left_out + 1 :])
        assert verdict_of(account).verdict


MOMENTS = st.lists(
    st.tuples(
        st.sampled_from(["use", "report", "failed", "resized"]),
        st.floats(0.01, 5.0),
        st.integers(1, 3),
        st.lists(st.integers(0, 5), min_size=5, max_size=5),
    ),
    max_size=20,
)


@given(MOMENTS, st.booleans())
def test_the_buckets_of_any_run_sum_to_its_time(moments: Any, has_ended: bool) -> None:
    lost_by_segments = [0.0]
    account = Account(lambda *segment: lost_by_segments.append(sum(segment[3])))
    at, number, ranks, since = 1.0, 0, 2, 1.0
    account.add(event(0.0, "run"))
    account.add(event(at, "attempt", number=0, ranks=ranks))
    for kind, seconds, count, shares in moments:
        at += seconds
        parts = dict(zip(("stepped", "data", "checkpoint", "first", "idle"), shares, strict=True))
        whole = max(1, sum(shares)) / (1 - 1e-9)
        if kind == "use":
            row = {name: part / whole for name, part in parts.items() if name != "idle"}
            first = (at - since) * row.pop("first")
            account.add(use(at, *(worked(rank, at - since, first, **row) for rank in range(ranks))))
            since = at
        elif kind == "report":
            account.add(event(at, "report", checkpoint="c", metrics={}))
        else:
            account.add(event(at, "attempt_ended", state=kind))
            number, ranks, since = number + 1, count, at
            account.add(event(at, "attempt", number=number, ranks=ranks))
    if has_ended:
        account.add(event(at, "attempt_ended", state="finished"))
        account.add(event(at + 1, "end", state="finished"))
    for rank in account.ranks.values():
        assert min(rank.seconds) > -1e-6
        assert sum(account.seconds_of(rank)) == pytest.approx(account.duration, abs=1e-3)
    assert sum(lost_by_segments) == pytest.approx(
        sum(sum(r.seconds) for r in account.ranks.values())
    )


BUSY = {"stepped": 1.0, "waited": 0.05, "step_cpu": 0.9, "models": 1e-3}
WAITS = {"stepped": 1.0, "waited": 0.5, "step_cpu": 0.4, "models": 1e-3}
LOADS = {"stepped": 0.5, "data": 0.5, "step_cpu": 0.4, "models": 1e-3}
OTHER = {"stepped": 1.0, "step_cpu": 0.9}
"""Shares of a rank's second; the last is that of a model whose waiting is not known."""


def lasting(events: Events, seconds: int, *ranks: Mapping[str, float]) -> Events:
    """Return a run that goes on so much longer."""
    begin = int(events[-1]["at"]) if events else 0
    start = [event(0.0, "run"), event(0.0, "attempt", number=0, ranks=len(ranks))]
    start.append(event(0.0, "started", ranks=list(range(len(ranks))), host="here"))
    rows = [worked(rank, 1.0, **shares) for rank, shares in enumerate(ranks)]
    return (events or start) + [use(at, *rows) for at in range(begin + 1, begin + seconds + 1)]


@pytest.mark.parametrize(
    ("ranks", "verdict", "rank", "text"),
    [
        ([BUSY] * 4, "healthy", None, "95 % compute, 5 % waiting for other ranks"),
        ([WAITS] * 4, "healthy", None, "50 % waiting for other ranks"),
        ([WAITS, WAITS, BUSY], "straggler", 2, "by its CPU time"),
        ([WAITS, {**BUSY, "step_cpu": 0.4}], "straggler", 1, "without using its CPU"),
        ([LOADS, WAITS, WAITS], "straggler", 0, "wait 50 ms in each step.*longer for its data"),
        ([BUSY, WAITS, {**WAITS, "waited": 0.45}, WAITS], "straggler", 0, "CPU time"),
        ([WAITS, {**WAITS, "stopped": 0.2}], "straggler", 1, "wait 20 ms.*was stopped for 12"),
        ([WAITS, *[{**WAITS, "stopped": 0.2}] * 2], "healthy", None, "50 % waiting"),
        ([LOADS] * 2, "input-bound", None, "50 % of the time for data: 50 ms of 100 ms"),
        ([OTHER, {**LOADS, "models": 0}, OTHER], "straggler", 1, "longer for its data"),
        ([OTHER] * 2, "healthy", None, "100 % compute"),
        ([{**LOADS, "data": 0, "checkpoint": 0.5}] * 2, "checkpoint-bound", None, "50 % .* saving"),
    ],
)
def test_the_cause_is_named_only_if_it_explains_the_wait(
    ranks: Any, verdict: str, rank: int | None, text: str
) -> None:
    found = verdict_of(account_of(lasting([], 60, *ranks)))
    assert (found.verdict, found.rank) == (verdict, rank)
    assert re.search(text, found.why)


def test_a_rank_that_becomes_slow_is_in_the_verdict_of_the_last_minutes() -> None:
    events = lasting(lasting([], 7200, BUSY, BUSY), 360, WAITS, BUSY)
    account = account_of(events)
    recent = recent_verdict_of(account)
    assert recent is not None
    assert (verdict_of(account).verdict, recent.verdict, recent.rank) == ("healthy", "straggler", 1)
    idle = {"steps": 0.0}
    found = verdict_of(account_of(lasting(events, 60, idle, idle)))
    assert found.why == "No rank has done anything for 1 min 0 s."


class Sizes:
    """Counts the bytes of a log."""

    size = 0

    def add(self, event: Mapping[str, Any]) -> None:
        self.size += len(json.dumps(event, separators=(",", ":"))) + 1


def counted(ranks: int, age: float) -> RanksUse:
    shares = (0.5, 0.7 * age, 0.1 * age, 0.1 * age, 0.2 * age, 0.6 * age)
    counters = Counters(age, age, 2048, 97, 40000, 10 * age, *shares)[:NUM_REPORTED]
    return RanksUse([[rank, *counters] for rank in range(ranks)])


@pytest.mark.parametrize(("ranks", "hours", "limit"), [(64, 24, 50e6), (1000, 168, 500e6)])
def test_the_log_of_a_long_run_is_small(ranks: int, hours: int, limit: float) -> None:
    """By the size of a window at some ages, of which none is exceeded until the next one."""
    total = 0.0
    ages = [hours * 3600 * (part / 24) ** 4 for part in range(25)]
    for age, until in itertools.pairwise(ages):
        clock, log = Clock(), Sizes()
        began = clock.now
        events = RunEvents(log, clock=clock)  # type: ignore[arg-type]
        events.begin_attempt(0, ranks)
        for seconds in (age, age + 100):
            log.size, clock.now = 0, max(clock.now, began + age)
            events.note_use(counted(ranks, seconds))
            events.note_progress(age, None, {f"metric {number}": age / 7 for number in range(10)})
            begun = clock.now
            while not events.tick():
                clock.now += 1
        total += log.size / (clock.now - begun) * (until - age)
    assert limit / 10 < total < limit


def test_curves_and_timelines_are_thinned() -> None:
    curve, timeline = Curve(), Timeline()
    for second in range(10_000):
        curve.add(second, second % 10)
        timeline.add(0, second, second + 1, [0.25] + [0.0] * (len(BUCKETS) - 2) + [0.75])
    points = curve.points
    assert MAX_POINTS / 2 <= len(points) <= MAX_POINTS
    assert sum(value for _, value in points) / len(points) == pytest.approx(4.5, abs=0.1)
    shown = timeline.data(0.0, [0])
    [row] = shown["rows"]
    assert NUM_BINS / 2 <= len(row["bins"]) <= NUM_BINS
    assert row["bins"][0] == [0, 0.25, len(BUCKETS) - 1, 0.75]
    assert sum(sum(shares[1::2]) for shares in row["bins"]) * shown["width"] == pytest.approx(
        1e4, abs=1
    )


def test_the_oldest_logs_are_removed(tmp_path: Path) -> None:
    logs = [tmp_path / f"{number:04}.jsonl" for number in range(210)]
    for log in logs:
        log.write_bytes(b"")
    with logs[0].open("rb") as written, logs[-3].open("r+b") as large:
        fcntl.flock(written, fcntl.LOCK_EX)
        remove_oldest(tmp_path)
        assert sorted(tmp_path.iterdir()) == [logs[0], *logs[-199:]]  # there is room for another
        large.truncate(600_000_000)
        remove_oldest(tmp_path)
        assert sorted(tmp_path.iterdir()) == [logs[0], *logs[-2:]]


HOSTILE = "<script src=https://example.org/x.js></script><img src=x onerror=alert(1)>'\"&"


def test_the_page_of_a_long_run_is_small_and_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    clock = Clock()
    facts = {"run": "a", "settings": {HOSTILE: HOSTILE}}
    facts |= dict.fromkeys(("name", "host", "user", "logs"), HOSTILE)
    log = EventLog("a", None, {})
    with RunEvents(log, facts, clock) as events:
        events.begin_attempt(0, 64)
        events.add("started", ranks=list(range(64)), host=HOSTILE)
        for second in range(1, 1001):
            clock.now += 1
            events.note_use(counted(64, second))
            events.note_progress(second, None, {HOSTILE: second})
            if events.tick():
                events.log.flush()
            if second % 100 == 0:
                events.add_report({"checkpoint": HOSTILE, "number": 1, "metrics": {"loss": 1.0}})
        failed = {"attempt": 0, "rank": 1, "host": HOSTILE, "step": 1}
        events.add("failure", **failed, summary=HOSTILE, text=HOSTILE)
        events.add_stacks({1: HOSTILE}, 30.0, stalled=True)
        events.end_attempt(ValueError(HOSTILE))
    summary = read_summary(log.path)
    assert summary["ranks"][63]["steps"] == 10_000
    html = render(summary)
    assert len(html.encode()) < 2e6
    assert html.count("&lt;script") > 8
    assert not re.search(r"<(script|img|link|iframe)|<[^>]*\ssrc=|@import|url\(", html)
