"""Where the tasks of an ordinary job exchange texts: in the driver's process, in rounds."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field


@dataclass
class _Round:
    deadline: float
    texts: dict[int, str] = field(default_factory=dict)
    ended: bool = False


class Exchange:
    """Collects one text of each task in each round, for the tasks that wait for them.

    Tasks that come to the first round take part; the other rounds wait for these alone. What a
    round has collected when it ends is what everyone gets, so a task that Spark runs again gets
    the same as the others.

    Parameters
    ----------
    size : int
        How many tasks there are.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._rounds: dict[int, _Round] = {}
        self._changed = threading.Condition()

    def attend(self, number: int, task: int, text: str, seconds: float) -> dict[int, str]:
        """Wait until the texts of a round are there; return them by task.

        Parameters
        ----------
        number : int
            The number of the round; the first is 0.
        task : int
            The index of the task.
        text : str
            Its text.
        seconds : float
            How long the round lasts at most, if this task is the first to come.
        """
        with self._changed:
            found = self._rounds.setdefault(number, _Round(time.monotonic() + seconds))
            if not found.ended:
                found.texts[task] = text
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: found.ended or len(found.texts) >= self._expected(number),
                    found.deadline - time.monotonic(),
                )
                found.ended = True
                self._changed.notify_all()
            return dict(found.texts)

    def _expected(self, number: int) -> int:
        return self._size if number == 0 else len(self._rounds[0].texts)
