"""What a study shows of itself: a line below the output, or a block of a notebook."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping

from distributor.core.text import duration, escaped
from distributor.screen.run_block import RunBlock
from distributor.screen.screen import SCREEN, Live, kind

STATES = ("running", "complete", "pruned", "failed")
"""Of trials, in the order in which they are shown."""


class StudyBlock(RunBlock):
    """A study's block; a context manager.

    Parameters
    ----------
    name : str
        The name of the study.
    n_trials : int or None
        How many trials it has.
    timeout : float or None
        Seconds until no further trial begins.
    """

    def __init__(self, name: str, n_trials: int | None, timeout: float | None) -> None:
        super().__init__(lambda: name, {})
        self._state = "running"
        self._n_trials, self._timeout = n_trials, timeout
        self.counts: Counter[str] = Counter(dict.fromkeys(STATES, 0))
        """The numbers of trials, by how they are."""
        self.best = ""

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)  # type: ignore[arg-type]
        SCREEN.show(self, [], None)

    def tick(self) -> None:
        super().tick()
        if kind("stderr") == "terminal":
            SCREEN.show(self, [], Live("stderr", f"{self._name()}: {self.line()}"))

    def line(self) -> str:
        """Return the state of the study as one line."""
        done = sum(self.counts[state] for state in STATES[1:])
        total = f" of {self._n_trials}" if self._n_trials else ""
        parts = [f"{done}{total} trials"]
        parts += [f"{count} {state}" for state, count in self.counts.items() if count]
        return ", ".join([*parts, *self._time_left(done)]) + (self.best and f"; best {self.best}")

    def _time_left(self, done: int) -> Iterator[str]:
        elapsed = time.monotonic() - self._began
        left = [] if self._timeout is None else [self._timeout - elapsed]
        if self._n_trials and done:
            left.append(elapsed / done * (self._n_trials - done))
        if left and not self._is_over:
            yield f"about {duration(max(0, int(min(left))))} left"

    def _text(self) -> str:
        return f"{self._name()}: {self.line()}"

    def _content(self) -> Iterator[str]:
        yield f"<div>{escaped(self.line())}</div>"


def shown(params: Mapping[str, object]) -> str:
    """Return parameters as text."""
    texts = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in params.values())
    return ", ".join(f"{name}={text}" for name, text in zip(params, texts, strict=True))
