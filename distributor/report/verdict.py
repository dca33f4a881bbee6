"""What limits a run, why, and what to do next: a function of its account."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from distributor.core.text import counted, duration, listed
from distributor.node.worker.stacks import collective_number, place_of, waits_for_others
from distributor.rank.step_clock import Counters
from distributor.report.account import LOST, RECOVERY, Account, Window, joined

MIN_STEPS, MIN_SECONDS = 20, 5.0
"""Steps of a rank, and seconds, below which nothing can be said."""
LEAST_SHARE = 0.15
"""The part of the time from which on a cause is named."""
MOST = 0.5
"""The part of all time lost that a cause must explain to be named."""
SURE = 0.7
"""The same of a rank that is slow without using its CPU: a busy machine slows ranks in turns."""
STEADY = 0.75
"""The part of a run's parts in which a straggler must be the slowest."""
NUM_PARTS = 4
"""Parts into which the time is divided for that."""
MAX_STRETCH = 4.0
"""How many times the CPU time of a step may be its time, on a busy machine."""
IDLE_SECONDS, IDLE_CPU = 30.0, 0.05
"""Seconds in which no rank does anything, or uses that part of a core, for a run that lasts."""


TOO_SHORT = "too short to say"


class Verdict(NamedTuple):
    """What limits a run.

    Parameters
    ----------
    verdict : str
        "healthy", "input-bound", "straggler", "checkpoint-bound", "restart-bound", "stalled" or
        "too short to say".
    why, next : str
        Sentences: the figures behind it, and what to do.
    rank : int or None
        The rank that is the cause, if one is.
    host : str or None
        Its host.
    """

    verdict: str
    why: str
    next: str
    rank: int | None = None
    host: str | None = None

    def with_recent(self, recent: Verdict | None) -> Verdict:
        """Return this verdict with that about the last five minutes, if it is another."""
        if recent is None or recent.verdict in (self.verdict, TOO_SHORT):
            return self
        why = f"{self.why} In the last five minutes: {recent.verdict}. {recent.why}"
        return self._replace(why=why, next=f"{self.next} {recent.next}")

    def __str__(self) -> str:
        return f"Verdict: {self.verdict.upper()}\n  Why: {self.why}\n  Next: {self.next}"


def verdict_of(account: Account) -> Verdict:
    """Return the verdict about a run."""
    return (
        _stalled(account)
        or _restart_bound(account)
        or _verdict_of_steps(account, account.parts, account.duration)
    )


def recent_verdict_of(account: Account) -> Verdict | None:
    """Return the verdict about the last five minutes of a run that is older and goes on."""
    if account.ended is not None or not account.recent or not account.parts:
        return None
    if account.recent[0].begin <= account.parts[0].end:
        return None
    windows = list(account.recent)
    return _verdict_of_steps(account, windows, windows[-1].end - windows[0].begin)


# A run that has stopped or is made again


def _stalled(account: Account) -> Verdict | None:
    stall = account.stalls[-1] if account.stalls else None
    if stall is not None and stall["at"] < account.attempts[-1]["began"]:
        stall = None  # another attempt has followed
    if stall is not None and stall["stalled"]:
        return _verdict_of_stall(account, stall["stacks"], stall["seconds"])
    if account.ended is not None:
        return None
    idle = list(itertools.takewhile(_is_idle, reversed(account.recent)))
    seconds = sum(window.end - window.begin for window in idle)
    ranks = [rank for rank in account.ranks.values() if rank.attempt_steps]
    if seconds < IDLE_SECONDS or not ranks:
        return None
    since = max(rank.until for rank in ranks)
    stacks = stall["stacks"] if stall is not None and stall["at"] >= since else {}
    return _verdict_of_stall(account, stacks, account.now - since)


def _is_idle(window: Window) -> bool:
    """Return whether no rank has made a step, loaded data, reported, or used its CPU."""
    return bool(window.rows) and not any(
        use.steps or use.data or use.checkpoint or use.cpu > IDLE_CPU * use.alive
        for use in window.rows.values()
    )


def _verdict_of_stall(account: Account, stacks: Mapping[str, str], seconds: float) -> Verdict:
    missing = not_in_collective(stacks)
    why = f"No rank has done anything for {duration(seconds)}."
    if not stacks or len(missing) == len(stacks) > 1 or not missing:
        return Verdict(
            "stalled",
            why,
            "Look at the ranks' stacks: distributor.stacks() and Ctrl-\\ show them while the run "
            "lasts; stall_timeout ends such a run, and shows them.",
        )
    rank = missing[0]
    host = _host(account, missing)
    place = place_of(stacks[str(rank)])
    verb = "has" if len(missing) == 1 else "have"
    return Verdict(
        "stalled",
        f"{why} {listed('Rank', missing)}{host} {verb} not entered the collective in which the "
        f"others wait{f': it is {place}' if place else ''}.",
        "See why it does not go on at this line. If it takes another path than the others, let "
        "all ranks make the same calls of collectives.",
        rank,
        account.ranks[rank].host,
    )


def _host(account: Account, ranks: Sequence[int]) -> str:
    """Return the host of ranks as a part of a sentence, if all are on one."""
    hosts = {account.ranks[rank].host for rank in ranks if rank in account.ranks} - {""}
    return f" on {hosts.pop()}" if len(hosts) == 1 else ""


def not_in_collective(stacks: Mapping[str, str]) -> list[int]:
    """Return the ranks that have not entered the collective in which the others wait."""
    numbers = {rank: collective_number(stack) for rank, stack in stacks.items()}
    if None not in numbers.values() and len(set(numbers.values())) > 1:
        first = min(number for number in numbers.values() if number is not None)
        return [int(rank) for rank, number in numbers.items() if number == first]
    return [int(rank) for rank, stack in stacks.items() if not waits_for_others(stack)]


def _restart_bound(account: Account) -> Verdict | None:
    sums = account.total()
    share = (sums[LOST] + sums[RECOVERY]) / (sum(sums) or 1.0)
    failed = [attempt for attempt in account.attempts if attempt["state"] == "failed"]
    if not failed or share < LEAST_SHARE or account.duration < MIN_SECONDS:
        return None
    shares = _Shares(account, joined(account.parts)) if account.parts else None
    if shares and share < max(shares.data, shares.checkpoint):
        return None
    more = "" if account.num_checkpoints else " The run has reported no checkpoint."
    return Verdict(
        "restart-bound",
        f"{100 * share:.0f} % of the time went into {counted(len(failed), 'failed attempt')}: "
        f"{duration(sums[LOST] / len(account.ranks))} of work that was done again, "
        f"{duration(sums[RECOVERY] / len(account.ranks))} of recovery.{more}",
        "See why attempts fail (below, and in the ranks' output), and report checkpoints more "
        "often: train.report(metrics, checkpoint=...) with storage_path.",
    )


# Steps


class _Shares:
    """The mean step of each rank (seconds), and the parts of it that ranks have in common."""

    def __init__(self, account: Account, total: Window) -> None:
        self.steps = max((use.steps for use in total.rows.values()), default=0.0)
        # Without those that took part for a while only.
        self.rows = {
            rank: Counters(*(each / use.steps for each in use))
            for rank, use in total.rows.items()
            if use.steps > self.steps / 10 and rank in account.ranks
        }
        rows = list(self.rows.values())
        times = [row.stepped + row.data + row.checkpoint for row in rows]
        self.time = statistics.fmean(times) if times else 0.0
        self.wait_is_known = all(account.ranks[rank].use.models for rank in self.rows)
        self.wait = self._share(statistics.median(row.waited for row in rows)) if rows else 0.0
        # What nearly all ranks have: one that has more is a straggler.
        self.data = self._share(_quarter(row.data for row in rows))
        self.checkpoint = self._share(_quarter(row.checkpoint for row in rows))

    def _share(self, seconds: float) -> float:
        return seconds / self.time if self.time else 0.0


def _quarter(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 4] if ordered else 0.0


class _Straggler(NamedTuple):
    ranks: list[int]
    share: float
    seconds: float  # that others wait for it
    explained: float  # the part of what others wait that it explains
    reason: str = ""  # of `_extras`


def _verdict_of_steps(account: Account, parts: Sequence[Window], seconds: float) -> Verdict:
    shares = _Shares(account, joined(parts))
    took = shares.steps * shares.time
    if shares.steps < MIN_STEPS or took < MIN_SECONDS:
        if account.facts.get("step_times") is False:
            return Verdict(TOO_SHORT, "Steps were not counted: step_times is off.", "Leave it on.")
        what = f"{counted(int(shares.steps), 'step')} of an optimizer"
        return Verdict(
            TOO_SHORT,
            f"The run had {what}{f', which took {duration(took)},' if took else ''} in "
            f"{duration(seconds)}; {MIN_STEPS} in {MIN_SECONDS:g} s are needed.",
            "Train longer. What is trained without an optimizer of torch is not seen.",
        )
    straggler = _straggler_in(account, shares, parts)
    causes: list[tuple[float, Callable[[], Verdict]]] = [
        (shares.data, lambda: _input_bound(shares)),
        (shares.checkpoint, lambda: _checkpoint_bound(account, shares)),
    ]
    if straggler is not None:
        found = straggler
        causes.append((found.share, lambda: _verdict_of_straggler(account, shares, found)))
    share, verdict = max(causes, key=lambda cause: cause[0])
    others_wait = straggler.share if straggler else shares.wait
    lost = shares.data + shares.checkpoint + others_wait
    if share >= LEAST_SHARE and share >= MOST * lost:
        return verdict()
    return _healthy(shares)


def _straggler_in(account: Account, shares: _Shares, parts: Sequence[Window]) -> _Straggler | None:
    found = _stopped(shares) or _slowest(shares)
    if found is None or found.reason:
        return found
    extras = _extras(shares, found)
    found = found._replace(reason=max(extras, key=lambda name: extras[name]))
    if found.explained < (SURE if found.reason == "sleeps" else MOST):
        return None
    compared = [_slowest(_Shares(account, part)) for part in _divided(parts)]
    agreeing = [
        slowest
        for slowest in compared
        if slowest and slowest.ranks[0] in found.ranks and slowest.share >= found.share / 3
    ]
    return found if len(agreeing) >= STEADY * NUM_PARTS else None


def _divided(windows: Sequence[Window]) -> list[Window]:
    """Return parts of about the same length, of the time in which there are steps."""
    windows = [w for w in windows if any(use.steps for use in w.rows.values())]
    begin, length = windows[0].begin, (windows[-1].end - windows[0].begin) / NUM_PARTS
    parts: list[list[Window]] = [[] for _ in range(NUM_PARTS)]
    for window in windows:
        middle = (window.begin + window.end) / 2
        parts[min(NUM_PARTS - 1, int((middle - begin) / (length or 1.0)))].append(window)
    return [joined(part) for part in parts if part]


def _stopped(shares: _Shares) -> _Straggler | None:
    """Return the rank that was stopped, which is seen, and not inferred from what others wait."""
    rank = max(shares.rows, key=lambda rank: shares.rows[rank].stopped)
    others = [row.stopped for each, row in shares.rows.items() if each != rank]
    seconds = shares.rows[rank].stopped - statistics.median(others or [math.inf])
    if seconds < LEAST_SHARE * shares.time:
        return None
    return _Straggler([rank], seconds / shares.time, seconds, 1.0, "stopped")


def _slowest(shares: _Shares) -> _Straggler | None:
    """Return the ranks that wait least for others, and what the others wait for them.

    If waiting is not known, those that take longest for data and checkpoints, or are stopped.
    """
    if len(shares.rows) < 2:
        return None
    if shares.wait_is_known:
        waits = {rank: row.waited for rank, row in shares.rows.items()}
    else:
        waits = {
            rank: -row.data - row.checkpoint - row.stopped for rank, row in shares.rows.items()
        }
    slowest = min(waits, key=lambda rank: waits[rank])
    typical = statistics.median(wait for rank, wait in waits.items() if rank != slowest)
    excess = typical - waits[slowest]
    ranks = [slowest] + [
        rank for rank in sorted(waits) if rank != slowest and typical - waits[rank] > excess / 2
    ]
    explained = excess / typical if typical > 0 else 1.0
    return _Straggler(ranks, excess / shares.time if shares.time else 0.0, excess, explained)


def _verdict_of_straggler(account: Account, shares: _Shares, straggler: _Straggler) -> Verdict:
    rank = straggler.ranks[0]
    host = account.ranks[rank].host
    if straggler.reason == "checkpoint":
        return _checkpoint_bound(account, shares, rank)
    reason, advice = _reason(shares, straggler)
    who = f"{listed('Rank', sorted(straggler.ranks))}{_host(account, straggler.ranks)}"
    pronoun = "it" if len(straggler.ranks) == 1 else "them"
    return Verdict(
        "straggler",
        f"{who}: the other ranks wait {_milliseconds(straggler.seconds)} in each step for "
        f"{pronoun}, {100 * straggler.share:.0f} % of the time. {reason}",
        advice,
        rank,
        host,
    )


def _extras(shares: _Shares, straggler: _Straggler) -> dict[str, float]:
    """Return the seconds of a step that the straggler takes longer than a typical other rank."""
    own = shares.rows[straggler.ranks[0]]
    others = [row for each, row in shares.rows.items() if each not in straggler.ranks] or [own]

    def extra(value: Callable[[Counters], float]) -> float:
        return value(own) - statistics.median(map(value, others))

    stopped = extra(lambda row: row.stopped)
    computed = extra(lambda row: row.stepped - row.waited) - stopped
    # Where processes share CPUs, more CPU time takes more time than that.
    stretch = statistics.median(
        (row.stepped - row.waited) / row.step_cpu if row.step_cpu else 1.0 for row in others
    )
    used_cpu = min(computed, extra(lambda row: row.step_cpu) * min(max(stretch, 1.0), MAX_STRETCH))
    return {
        "data": extra(lambda row: row.data),
        "checkpoint": extra(lambda row: row.checkpoint),
        "stopped": stopped,
        "computes": used_cpu,
        "sleeps": computed - used_cpu,
    }


def _reason(shares: _Shares, straggler: _Straggler) -> tuple[str, str]:
    """Return what makes a rank slow, and what to do."""
    extras, reason = _extras(shares, straggler), straggler.reason
    more = _milliseconds(extras[reason])
    seconds = duration(shares.rows[straggler.ranks[0]].stopped * shares.steps)
    return {
        "data": (
            f"It waits {more} longer for its data in each step.",
            "Look at its share of the data, its storage and the workers of its loader.",
        ),
        "stopped": (
            f"Its process was stopped for {seconds}, as by SIGSTOP, a debugger or a container that "
            "is paused.",
            "Find out what stops processes on its host.",
        ),
        "computes": (
            f"It computes {more} longer in each step, by its CPU time.",
            "Look at what only it does (evaluation, logging), at the sizes of its batches, and at "
            "its host's clock and load.",
        ),
        "sleeps": (
            f"It takes {more} longer in each step without using its CPU or loading data: it "
            "sleeps, waits for storage, a network or a lock, or other processes use its CPUs.",
            "Look at its stack with Ctrl-\\ or distributor.stacks(), and at the load of its host.",
        ),
    }[reason]


def _input_bound(shares: _Shares) -> Verdict:
    data = statistics.median(row.data for row in shares.rows.values())
    return Verdict(
        "input-bound",
        f"Ranks wait {100 * shares.data:.0f} % of the time for data: {_milliseconds(data)} of "
        f"{_milliseconds(shares.time)} in each step.",
        "Prepare batches beside the training: DataLoader(num_workers=..., prefetch_factor=...), "
        "prefetch_batches= of iter_torch_batches, and work per sample that is done once before.",
    )


def _checkpoint_bound(account: Account, shares: _Shares, rank: int | None = None) -> Verdict:
    seconds = max(row.checkpoint for row in shares.rows.values())
    share = seconds / shares.time if rank is not None else shares.checkpoint
    reported = account.num_checkpoints
    times = f" ({counted(reported, 'checkpoint')})" if reported else ""
    who = "Ranks spend" if rank is None else f"Rank {rank} spends"
    return Verdict(
        "checkpoint-bound",
        f"{who} {100 * share:.0f} % of the time in saving and reporting{times}: "
        f"{duration(seconds * shares.steps)} in all.",
        "Report less often, or upload in the background: train.report(..., "
        "checkpoint_upload_mode=CheckpointUploadMode.ASYNC), dcp.async_save.",
        rank,
        None if rank is None else account.ranks[rank].host,
    )


def _healthy(shares: _Shares) -> Verdict:
    compute = 1.0 - shares.data - shares.checkpoint - shares.wait
    why = (
        f"A step takes {_milliseconds(shares.time)}: {100 * compute:.0f} % compute"
        f"{_percent(shares.wait, 'waiting for other ranks and communication')}"
        f"{_percent(shares.data, 'data')}{_percent(shares.checkpoint, 'checkpoints')}."
    )
    advice = "Nothing stands out."
    if not shares.wait_is_known and len(shares.rows) > 1:
        advice += (
            " Whether ranks wait for a slow one is not known: no model is in "
            "DistributedDataParallel."
        )
    if shares.wait > 2 * LEAST_SHARE:
        advice = (
            "No rank is slower than the others. If communication is the limit: larger batches, "
            "gradient accumulation (no_sync), or a faster network."
        )
    return Verdict("healthy", why, advice)


def _milliseconds(seconds: float) -> str:
    return duration(seconds) if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _percent(share: float, what: str) -> str:
    return f", {100 * share:.0f} % {what}" if share >= 0.005 else ""
