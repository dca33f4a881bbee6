"""A run's block below a notebook's cell: its state, ranks and result, updated in place."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from distributor.core.text import (
    BLUE,
    GRAY,
    GREEN,
    RED,
    counted,
    duration,
    escaped,
    first_line,
    linked,
    plain,
    table,
)
from distributor.errors import RunCancelled
from distributor.rank.messages import Progress, Reported
from distributor.screen.messages import notices_go_to, shows_notices
from distributor.screen.screen import kind

BAR_WIDTH = 10


class RunProgress:
    """The progress of an attempt.

    Parameters
    ----------
    num_ranks : int
        The number of its ranks.
    clock : callable
        Returns monotonic seconds.

    Attributes
    ----------
    hosts : dict of int to str
        The host of each rank that has started.
    """

    def __init__(self, num_ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_ranks = num_ranks
        self.hosts: dict[int, str] = {}
        self._ended: dict[int, str] = {}
        self._clock = clock
        self._began = clock()
        self._first: Progress | None = None
        self._latest: Progress | None = None
        self.checkpoints = 0
        """How many checkpoints the ranks have reported, from which another attempt continues."""

    @property
    def is_reported(self) -> bool:
        """Whether rank 0 has reported its progress."""
        return self._latest is not None

    @property
    def all_started(self) -> bool:
        """Whether all ranks have started."""
        return len(self.hosts) == self.num_ranks

    @property
    def states(self) -> dict[int, str]:
        """The state of each rank: "starting", "running", "finished" or "failed"."""
        states = dict.fromkeys(range(self.num_ranks), "starting")
        return states | dict.fromkeys(self.hosts, "running") | self._ended

    def start(self, ranks: Collection[int], host: str) -> None:
        """Record that ranks have started, or join. The time starts with the last of the start."""
        has_begun = self.all_started
        self.hosts.update(dict.fromkeys(ranks, host))
        self.num_ranks = max(self.num_ranks, len(self.hosts))  # some may have joined the others
        for rank in ranks:
            self.replace(rank)
        if self.all_started and not has_begun:
            self._began = self._clock()

    def replace(self, rank: int) -> None:
        """Record that another process takes the place of a rank."""
        self._ended.pop(rank, None)

    def end(self, ranks: Iterable[int], state: str) -> None:
        """Record that ranks have ended; the first state that is recorded for a rank remains."""
        for rank in ranks:
            self._ended.setdefault(rank, state)

    def update(self, latest: Progress) -> None:
        """Record rank 0's latest report."""
        self._first = self._first or latest
        self._latest = latest

    @property
    def share(self) -> float | None:
        """The part of the work that is done; None if it is not known."""
        latest = self._latest
        if latest is None or not latest.total or latest.done >= latest.total + 0.5:
            return None
        return latest.done / latest.total

    def line(self, name: str) -> str:
        """Return the progress as one line, in the format of tqdm."""
        if self._latest is None:
            elapsed = _interval(self._clock() - self._began)
            return ", ".join([f"{name} on {counted(self.num_ranks, 'rank')}", *self._up(), elapsed])
        if self.share is None:
            return f"{name}: {self.meter()}"
        return f"{name}: {100 * self.share:3.0f}%|{_bar(self.share)}| {self.meter()}"

    def meter(self) -> str:
        """Return rank 0's latest report, the time, the speed and the metrics."""
        assert self._latest is not None
        assert self._first is not None
        elapsed = self._clock() - self._began
        metrics = [f"{key}={value:.4g}" for key, value in self._latest.metrics.items()]
        notes = ", ".join([counted(self.num_ranks, "rank"), *self._up(), *metrics])
        done, total = self._latest.done, self._latest.total
        rate = _rate(self._first, self._latest) or (done / elapsed if elapsed else 0)
        speed = f"{1 / rate:5.2f}s/it" if 0 < rate < 1 else f"{rate:5.2f}it/s" if rate else "?it/s"
        if total is None or self.share is None:
            return f"{done}it [{_interval(elapsed)}, {speed}, {notes}]"
        remaining = _interval((total - done) / rate) if rate else "?"
        return f"{done}/{total} [{_interval(elapsed)}<{remaining}, {speed}, {notes}]"

    def _up(self) -> list[str]:
        return [] if self.all_started else [f"{len(self.hosts)} up"]


def _rate(first: Progress, latest: Progress) -> float | None:
    """Return the progress per second. A resumed run does not start at 0."""
    seconds = latest.at - first.at
    return (latest.done - first.done) / seconds if seconds > 0 else None


def _interval(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def _bar(share: float) -> str:
    whole, eighths = divmod(int(max(share, 0) * BAR_WIDTH * 8), 8)
    return ("█" * whole + " ▏▎▍▌▋▊▉"[eighths])[:BAR_WIDTH].ljust(BAR_WIDTH)


INTERVAL = 0.5
"""Seconds between two updates."""
MAX_ROWS = 16
"""The largest number of ranks that have a row each; of more, those that failed have one."""
MAX_MESSAGES = 100
"""The number of messages that are kept, the latest."""
MAX_LINE = 120
"""Characters of a rank's last line."""
COLORS = {"failed": RED, "finished": GREEN, "running": BLUE}
"""Of the states; others are gray."""


class RunBlock:
    """A run's block below a notebook's cell; a context manager. Elsewhere it shows nothing.

    Parameters
    ----------
    name : callable
        Returns how messages call the run.
    facts : mapping of str to str
        What is known about the run before its start, such as its id, by name.

    Attributes
    ----------
    progress : RunProgress or None
        That of the current attempt.
    verdict : object
        What limits the run, as text; None if that is not known.
    is_shown : bool
        Whether it is below a cell.
    """

    def __init__(self, name: Callable[[], str], facts: Mapping[str, str]) -> None:
        self._name = name
        self._facts = dict(facts)
        self._handle: Any = None  # of the IPython display, once it is shown
        self._began = 0.0
        self._due = 0.0
        self._shown = ""
        self._state = "waiting"
        self.progress: RunProgress | None = None
        self.verdict: object = None
        self._messages: list[str] = []
        self._last: dict[int, bytes] = {}
        self._context = ExitStack()
        self.is_shown = False

    def __enter__(self) -> RunBlock:
        self._began = time.monotonic()
        self.is_shown = kind("stdout") == "notebook" and shows_notices()
        if self.is_shown:
            self._context.enter_context(notices_go_to(self.add_message))
            self._show()
        return self

    def __exit__(self, cls: object, error: BaseException | None, trace: object) -> None:
        self._context.close()
        self._state = state_after(error)
        self._facts["duration"] = duration(time.monotonic() - self._began)
        if self.progress is not None and (hosts := set(self.progress.hosts.values())):
            ranks = counted(self.progress.num_ranks, "rank")
            self._facts["ranks"] = f"{ranks} on {counted(len(hosts), 'host')}"
        if error is not None and self._state == "failed":
            self._facts["error"] = f"{type(error).__name__}: {first_line(error)}"
        self._show()

    def add_message(self, message: str) -> None:
        """Show a message about the run instead of earlier ones, which can be unfolded."""
        self._messages = [*self._messages[1 - MAX_MESSAGES :], message]
        self._show()

    def follow(self, progress: RunProgress) -> None:
        """Show the progress of another attempt."""
        self.progress, self._state = progress, "running"
        self._last.clear()
        self._show()

    def note_output(self, rank: int, data: bytes) -> None:
        """Note what a rank has printed."""
        if self.is_shown and data.strip():
            self._last[rank] = data

    def note_report(self, report: Reported) -> None:
        """Note a report of the ranks."""
        if report.checkpoint is not None:
            self._facts["latest checkpoint"] = report.checkpoint

    def tick(self) -> None:
        """Update the block if it is due. Called again and again."""
        if self.is_shown and time.monotonic() >= self._due:
            self._show()

    def _show(self) -> None:
        if not self.is_shown:
            return
        self._due = time.monotonic() + INTERVAL
        page = self._page()
        if page != self._shown:
            self._shown = page
            with suppress(Exception):  # an old IPython, or one whose front end has gone
                self._update({"text/html": page, "text/plain": self._text()})

    def _update(self, data: dict[str, str]) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(data, raw=True)

    @property
    def _is_over(self) -> bool:
        return "duration" in self._facts

    def _text(self) -> str:
        """Return the block for front ends that show no HTML."""
        if self.progress is not None and not self._is_over:
            return self.progress.line(self._name())
        facts = self._facts.items() if self._is_over else ()
        return "\n".join([f"{self._name()}: {self._state}", *(f"{k}: {v}" for k, v in facts)])

    def _page(self) -> str:
        color = COLORS.get(self._state, GRAY)
        state = f'<span style="color: {color}">{self._state}</span>'
        if not self._is_over:
            state += f", {duration(int(time.monotonic() - self._began))}"
        parts = [f"<div><strong>{escaped(self._name())}</strong>: {state}</div>"]
        parts += self._content()
        if self._is_over:
            parts.append(table([name, linked(value)] for name, value in self._facts.items()))
        elif self._messages:
            parts.append(f"<div>{linked(self._messages[-1])}</div>")
        if len(self._messages) > 1:
            lines = "".join(f"<div>{linked(message)}</div>" for message in self._messages)
            parts.append(f"<details><summary>Messages</summary>{lines}</details>")
        border = f"border-left: 3px solid {color}; padding-left: 8px"
        return f'<div style="{border}">{"".join(parts)}</div>'

    def _content(self) -> Iterator[str]:
        if self.progress is not None and self.progress.is_reported:
            share = self.progress.share
            bar = "" if share is None else f'<progress value="{share:.4f}"></progress> '
            yield f"<div>{bar}{escaped(self.progress.meter())}</div>"
        if self.progress is not None and self._state != "finished":
            yield from self._ranks(self.progress)
        if self.verdict is not None:
            yield f'<div style="white-space: pre-wrap">{escaped(str(self.verdict))}</div>'

    def _ranks(self, progress: RunProgress) -> Iterator[str]:
        states = progress.states
        if self._is_over:  # nothing is left of a run that has ended
            left = {rank for rank, state in states.items() if state in ("starting", "running")}
            states |= dict.fromkeys(left, "stopped")
        shown = list(states)
        if progress.num_ranks > MAX_ROWS:
            counts = Counter(states.values()).items()
            yield f"<div>{counted(progress.num_ranks, 'rank')}: "
            yield ", ".join(f"{count} {state}" for state, count in counts) + "</div>"
            shown = [rank for rank in shown if states[rank] == "failed"][:MAX_ROWS]
        if shown:
            yield table(
                [
                    f"rank {rank}",
                    escaped(progress.hosts.get(rank, "")),
                    states[rank],
                    f"<code>{escaped(_last_line(self._last.get(rank, b'')))}</code>",
                ]
                for rank in shown
            )


def state_after(error: BaseException | None) -> str:
    """Return the state of a run that has ended with an error, or without one."""
    if error is None:
        return "finished"
    return "stopped" if isinstance(error, (RunCancelled, KeyboardInterrupt)) else "failed"


def _last_line(data: bytes) -> str:
    """Return the last line of a rank's output, as far as it is known."""
    text = data.decode(errors="backslashreplace")
    return plain(re.split(r"[\r\n]", text.rstrip())[-1])[:MAX_LINE]
