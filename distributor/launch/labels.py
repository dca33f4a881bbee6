"""Names for the runs of this process, by which their output is told apart."""

from __future__ import annotations

import threading
from types import TracebackType

_lock = threading.Lock()
_active: list[Label] = []


class Label:
    """A run's label among those that are active at the same time; a context manager.

    It is what the run runs, with a number if another active run has that label: ``train`` and
    ``train#2``. A run that was never beside another needs none.

    Parameters
    ----------
    name : str
        What it runs.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._needed = False

    def __enter__(self) -> Label:
        with _lock:
            taken = {label.name for label in _active}
            number, name = 1, self.name
            while self.name in taken:
                number += 1
                self.name = f"{name}#{number}"
            _active.append(self)
            if len(_active) > 1:
                for label in _active:
                    label._needed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _lock:
            _active.remove(self)

    def prefix(self, rank: int) -> str:
        """Return what stands in front of a rank's line: ``[3] ``, or ``[train 3] ``."""
        return f"[{self.name} {rank}] " if self._needed else f"[{rank}] "
