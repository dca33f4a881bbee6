"""A rank's failure is raised on the driver as it was raised there, over both launchers.

The functions that ranks run travel by value, as a notebook's code does. The failing line of each
has the comment "fails": the traceback must show it.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.ranks import Distribute, failures_of, my_rank, wait_to_be_stopped, wait_until

from distributor import RemoteError, UnpicklableError, WorkerDied
from distributor import policies as failure_grace

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


def module_of_the_rank_only() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "rank_only.py").write_text("class Broken(Exception):\n    pass\n")
        sys.path.insert(0, folder)
        broken = __import__("rank_only").Broken
        raise broken("all of its text", 12)  # fails


def keyboard_interrupt() -> None:
    raise KeyboardInterrupt("in the rank")  # fails


def unpicklable_value() -> object:
    return {"fine": 1, "a": [threading.Lock()]}


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
    attributes: Mapping[str, object] = field(default_factory=dict)
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
    Case(
        fail=module_of_the_rank_only,
        kind=RemoteError,
        says=("rank_only.Broken: ('all of its text', 12)",),
    ),
    Case(fail=keyboard_interrupt, kind=RemoteError, says=("KeyboardInterrupt: in the rank",)),
    Case(
        fail=unpicklable_value,
        kind=UnpicklableError,
        says=("returned a value that cannot be pickled: value['a'][0] is a lock",),
    ),
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
RANKS: dict[str, tuple[int, ...]] = {"first": (0,), "last": (1,), "all": (0, 1)}
"""The ranks that fail."""
ON_CLUSTER = (own_type, killed)
"""The cases that run on a cluster every day."""


def failing_runs() -> Iterator[Any]:
    """Yield each case locally and on a cluster, on a set of ranks in turn."""
    for number, case in enumerate(CASES):
        name, ranks = case.fail.__name__, list(RANKS)[number % len(RANKS)]
        yield pytest.param("local", ranks, case, id=f"local-{ranks}-{name}")
        marks = [pytest.mark.spark] + ([] if case.fail in ON_CLUSTER else [pytest.mark.slow])
        yield pytest.param("cluster", ranks, case, id=f"cluster-{ranks}-{name}", marks=marks)


@pytest.mark.parametrize(
    ("distribute", "ranks", "case"), [*failing_runs()], indirect=["distribute"]
)
def test_failure_is_raised_here_as_it_was_there(
    distribute: Distribute,
    ranks: str,
    case: Case,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail, failing = case.fail, RANKS[ranks]
    if ranks == "all":  # on a busy machine the second may fail well after the first
        monkeypatch.setattr(failure_grace, "AFTER_CAUSE_SECONDS", 20.0)

    def program() -> object:
        if my_rank() in failing:
            (tmp_path / str(my_rank())).touch()
            wait_until(lambda: len(list(tmp_path.iterdir())) == len(failing), "all are here")
            return fail()
        if my_rank() == 0:
            return "done"  # it stays, to serve the others
        wait_to_be_stopped()
        return "never"

    distributor = distribute(2)
    with pytest.raises(case.kind) as caught:
        distributor.run_all(program)

    error = caught.value
    assert type(error) is case.kind
    if case.args is not None:
        assert error.args == case.args
    for name, expected in case.attributes.items():
        assert getattr(error, name) == expected, name
    failures = failures_of(error)
    assert sorted(failures) == list(failing)
    first = next(iter(failures))
    check_traceback(error, case, first, failures[first].origin.host, distributor.local_mode)
    notes = "\n".join(vars(error).get("__notes__", [])).splitlines()
    assert "\n".join(line for line in notes if line.startswith("Also failed")) == "\n".join(
        f"Also failed: rank {rank}: {failures[rank].summary}" for rank in list(failures)[1:]
    )
    for rank, failure in failures.items():
        assert failure.origin.rank == rank
        assert not failure.collateral
        if case.kind is not RemoteError:
            assert failure.summary.partition(":")[0].endswith(case.kind.__name__)
        assert type(failure.exception()) is case.kind
        assert all(line in failure.text for line in case.lines)


def check_traceback(error: BaseException, case: Case, rank: int, host: str, is_local: bool) -> None:
    """Check that the error names its origin: the remote frame, the rank and its host."""
    shown = str(error) if case.kind is WorkerDied else str(error.__cause__)
    if case.kind in (RemoteError, UnpicklableError):
        assert all(text in str(error) for text in case.says)
    for text in (*case.says, *case.lines):
        assert text in shown
    local_rank = rank if is_local else 0
    origin = f"rank {rank} (local rank {local_rank}) on {host}, attempt 0"
    assert origin in shown
    if case.kind is WorkerDied:
        assert str(error).startswith(origin), "the message has the origin; no note repeats it"
        assert "Raised by" not in str(vars(error).get("__notes__"))
    else:
        assert vars(error)["__notes__"][-1].startswith(f"Raised by {origin}.")
    if case.kind is RemoteError:
        assert origin in str(error)
    assert host == socket.gethostname() if is_local else is_this_machine(host)


def is_this_machine(host: str) -> bool:
    """Return True if this machine can listen at an address; fail otherwise."""
    socket.create_server((host, 0)).close()
    return True
