"""Labels that tell apart the output of this process's active runs."""

from __future__ import annotations

import threading
from types import TracebackType

_lock = threading.Lock()
_active: list[RunLabel] = []


class RunLabel:
    """A run's label among the active runs; a context manager.

    The label is the program's name, with a number if another active run has the same name:
    ``train`` and ``train#2``. A run that never overlapped with another one is shown without it.

    Parameters
    ----------
    name : str
        The program's name.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._is_needed = False

    def __enter__(self) -> RunLabel:
        with _lock:
            taken = {label.name for label in _active}
            number, name = 1, self.name
            while self.name in taken:
                number += 1
                self.name = f"{name}#{number}"
            _active.append(self)
            if len(_active) > 1:
                for label in _active:
                    label._is_needed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _lock:
            _active.remove(self)

    def prefix(self, rank: int, num_ranks: int) -> str:
        """Return the prefix of a rank's lines: ``[3] ``, or ``[train 3] ``.

        All ranks' prefixes have the same length.
        """
        label = f"[{self.name} {rank}]" if self._is_needed else f"[{rank}]"
        return label + " " * (1 + len(str(num_ranks - 1)) - len(str(rank)))

    def message(self, text: str) -> str:
        """Return a message about the run, which starts with the label if it is needed."""
        return f"[{self.name}] {text}" if self._is_needed else text
