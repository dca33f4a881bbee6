"""A run's block below a notebook's cell: its state, ranks and result, updated in place."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Protocol

from distributor.core.html import BLUE, GRAY, GREEN, RED, escaped, linked, table
from distributor.core.text import counted, duration, first_line, plain
from distributor.errors import RunCancelled
from distributor.rank.messages import Reported
from distributor.screen.messages import notices_go_to, shows_notices
from distributor.screen.run_progress import RunProgress
from distributor.screen.screen import kind

INTERVAL = 0.5
"""Seconds between two updates."""
MAX_ROWS = 16
"""The largest number of ranks that have a row each; of more, those that failed have one."""
MAX_LINE = 120
"""Characters of a rank's last line."""
COLORS = {"failed": RED, "finished": GREEN, "running": BLUE}
"""Of the states; others are gray."""


class Display(Protocol):
    """An output of a notebook that is updated in place."""

    def show(self, page: str, text: str) -> None:
        """Show HTML, or text if the front end shows none."""


class NotebookDisplay:
    """An IPython display, created when it is first shown."""

    def __init__(self) -> None:
        self._handle: object = None

    def show(self, page: str, text: str) -> None:
        """Show HTML, or text if the front end shows none."""
        from IPython.display import display

        data = {"text/html": page, "text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(data, raw=True)  # type: ignore[attr-defined]


class RunBlock:
    """A run's block below a notebook's cell; a context manager. Elsewhere it shows nothing.

    Parameters
    ----------
    name : callable
        Returns how messages call the run.
    facts : mapping of str to str
        What is known about the run before its start, such as its id, by name.
    clock : callable
        Returns monotonic seconds.
    display : Display
        Shows the block.
    """

    def __init__(
        self,
        name: Callable[[], str],
        facts: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
        display: Display | None = None,
    ) -> None:
        self._name = name
        self._facts = dict(facts)
        self._clock = clock
        self._display = display or NotebookDisplay()
        self._began = 0.0
        self._due = 0.0
        self._shown = ""
        self._state = "waiting"
        self._progress: RunProgress | None = None
        self._messages: list[str] = []
        self._last: dict[int, bytes] = {}
        self._context = ExitStack()
        self._is_shown = False

    def __enter__(self) -> RunBlock:
        self._began = self._clock()
        self._is_shown = kind("stdout") == "notebook" and shows_notices()
        if self._is_shown:
            self._context.enter_context(notices_go_to(self.add_message))
            self._show()
        return self

    def __exit__(self, cls: object, error: BaseException | None, trace: object) -> None:
        self._context.close()
        self._state = _state_after(error)
        self._facts["duration"] = duration(self._clock() - self._began)
        if self._progress is not None and (hosts := set(self._progress.hosts.values())):
            ranks = counted(self._progress.num_ranks, "rank")
            self._facts["ranks"] = f"{ranks} on {counted(len(hosts), 'host')}"
        if error is not None and self._state == "failed":
            self._facts["error"] = f"{type(error).__name__}: {first_line(error)}"
        self._show()

    def add_message(self, message: str) -> None:
        """Show a message about the run instead of earlier ones, which can be unfolded."""
        self._messages.append(message)
        self._show()

    def follow(self, progress: RunProgress) -> None:
        """Show the progress of another attempt."""
        self._progress, self._state = progress, "running"
        self._last.clear()
        self._show()

    def note_output(self, rank: int, data: bytes) -> None:
        """Note what a rank has printed."""
        if self._is_shown and data.strip():
            self._last[rank] = data

    def note_report(self, report: Reported) -> None:
        """Note a report of the ranks."""
        if report.checkpoint is not None:
            self._facts["latest checkpoint"] = report.checkpoint

    def tick(self) -> None:
        """Update the block if it is due. Called again and again."""
        if self._is_shown and self._clock() >= self._due:
            self._show()

    def _show(self) -> None:
        if not self._is_shown:
            return
        self._due = self._clock() + INTERVAL
        page = self._page()
        if page != self._shown:
            self._shown = page
            with suppress(Exception):  # an old IPython, or one whose front end has gone
                self._display.show(page, self._text())

    @property
    def _is_over(self) -> bool:
        return "duration" in self._facts

    def _text(self) -> str:
        """Return the block for front ends that show no HTML."""
        if self._progress is not None and not self._is_over:
            return self._progress.line(self._name())
        facts = self._facts.items() if self._is_over else ()
        return "\n".join([f"{self._name()}: {self._state}", *(f"{k}: {v}" for k, v in facts)])

    def _page(self) -> str:
        color = COLORS.get(self._state, GRAY)
        state = f'<span style="color: {color}">{self._state}</span>'
        if not self._is_over:
            state += f", {duration(int(self._clock() - self._began))}"
        parts = [f"<div><strong>{escaped(self._name())}</strong>: {state}</div>"]
        if self._progress is not None and self._progress.is_reported:
            share = self._progress.share
            bar = "" if share is None else f'<progress value="{share:.4f}"></progress> '
            parts.append(f"<div>{bar}{escaped(self._progress.meter())}</div>")
        if self._progress is not None and self._state != "finished":
            parts += self._ranks(self._progress)
        if self._is_over:
            parts.append(table([name, linked(value)] for name, value in self._facts.items()))
        elif self._messages:
            parts.append(f"<div>{linked(self._messages[-1])}</div>")
        if len(self._messages) > 1:
            lines = "".join(f"<div>{linked(message)}</div>" for message in self._messages)
            parts.append(f"<details><summary>Messages</summary>{lines}</details>")
        border = f"border-left: 3px solid {color}; padding-left: 8px"
        return f'<div style="{border}">{"".join(parts)}</div>'

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


def _state_after(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    return "stopped" if isinstance(error, (RunCancelled, KeyboardInterrupt)) else "failed"


def _last_line(data: bytes) -> str:
    """Return the last line of a rank's output, as far as it is known."""
    text = data.decode(errors="backslashreplace")
    return plain(re.split(r"[\r\n]", text.rstrip())[-1])[:MAX_LINE]
