"""Functions that fail on a rank in different ways, and the errors that the driver then raises.

The failing line of each function has the comment "fails": the traceback must show it.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import cloudpickle

from distributor import (
    RemoteError,
    UnpicklableError,
    WorkerDied,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Tagged(Exception):
    pass


@dataclass
class Position:
    epoch: int
    history: list[float]


def own_type() -> None:
    error = Tagged("tagged\nin two lines")
    vars(error).update(step=7, position=Position(2, []))
    raise error  # fails


def chained() -> None:
    try:
        json.loads("{}")["missing"]  # fails first
    except KeyError as error:
        raise ValueError("chained") from error  # fails


def without_streams() -> None:
    sys.stdout.close()
    sys.stderr.close()
    raise ValueError("not to be printed")  # fails


def module_of_the_rank_only() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "rank_only.py").write_text("class Broken(Exception):\n    pass\n")
        sys.path.insert(0, folder)
        broken = __import__("rank_only").Broken
        raise broken("all of its text", 12)  # fails


def keyboard_interrupt() -> None:
    raise KeyboardInterrupt("in the rank")  # fails


def endless_recursion() -> None:
    endless_recursion()  # fails


def unpicklable_value() -> object:
    return {"fine": 1, "a": [threading.Lock()]}


def exit_3() -> None:
    print("about to leave")
    sys.exit(3)


def exit_with_text() -> None:
    sys.exit("no data found")


def hard_exit() -> None:
    print("about to leave")
    sys.stdout.flush()
    os._exit(5)


def killed() -> None:
    print("about to be killed")
    os.kill(os.getpid(), signal.SIGKILL)


def segmentation_fault() -> None:
    ctypes.string_at(0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a rank fails, and what the driver raises."""

    fail: Callable[[], object]
    kind: type[BaseException]
    args: tuple[object, ...] | None = None
    attributes: Mapping[str, object] | None = None
    says: tuple[str, ...] = ()
    """Texts that the message or the remote traceback contains, besides the failing line."""

    @property
    def lines(self) -> list[str]:
        """The source lines that a traceback of the failure shows."""
        source = inspect.getsource(self.fail).splitlines()
        return [line.strip() for line in source if "# fails" in line]


def died(fail: Callable[[], object], *says: str, **how: int) -> Case:
    attributes = {"exit_code": None, "signal": None, **how}
    return Case(fail=fail, kind=WorkerDied, attributes=attributes, says=says)


OUT_OF_MEMORY = "out-of-memory killer"
CASES = [
    Case(
        fail=own_type,
        kind=Tagged,
        args=("tagged\nin two lines",),
        attributes={"step": 7, "position": Position(2, [])},
    ),
    Case(
        fail=chained,
        kind=ValueError,
        args=("chained",),
        says=("KeyError: 'missing'", "direct cause of the following exception"),
    ),
    Case(fail=without_streams, kind=ValueError, args=("not to be printed",)),
    Case(
        fail=module_of_the_rank_only,
        kind=RemoteError,
        says=("rank_only.Broken: ('all of its text', 12)",),
    ),
    Case(fail=keyboard_interrupt, kind=RemoteError, says=("KeyboardInterrupt: in the rank",)),
    Case(fail=endless_recursion, kind=RecursionError, says=("Previous line repeated",)),
    Case(
        fail=unpicklable_value,
        kind=UnpicklableError,
        says=("returned a value that cannot be pickled: value['a'][0] is a lock",),
    ),
    died(exit_3, "exited with code 3", "about to leave", exit_code=3),
    died(exit_with_text, "no data found", exit_code=1),
    died(hard_exit, "exited with code 5", "about to leave", exit_code=5),
    died(killed, "SIGKILL", OUT_OF_MEMORY, "about to be killed", signal=9),
    died(
        segmentation_fault,
        "SIGSEGV",
        "Fatal Python error: Segmentation fault",
        "in segmentation_fault",
        signal=11,
    ),
]
