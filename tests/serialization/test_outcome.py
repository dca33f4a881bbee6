"""Outcomes of ranks: failures are captured, ordered, reported and raised again."""

from __future__ import annotations

import pickle
import signal
import tempfile
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from distributor.errors import RemoteError, WorkerDied
from distributor.serialization import oob_pickle, outcome
from distributor.serialization.outcome import (
    Failure,
    Origin,
    Value,
    cause_first,
    death,
    failure_of,
    raise_first,
)


def origin(rank: int) -> Origin:
    return Origin(rank=rank, local_rank=rank % 2, host="host-1", attempt=2)


def failure(rank: int, summary: str = "", *, collateral: bool = False) -> Failure:
    return Failure(
        origin=origin(rank), summary=summary, text="", pickled=None, collateral=collateral
    )


def caught(raiser: Callable[..., NoReturn], *args: Any) -> Any:
    try:
        raiser(*args)
    except BaseException as error:
        return error


@pytest.mark.parametrize(
    ("arrived", "expected"),
    [
        ([], []),
        ([(3, False), (1, False), (2, False)], [3, 1, 2]),
        ([(0, True), (3, False), (2, True), (1, False)], [3, 1, 0, 2]),
        ([(2, True), (0, True)], [2, 0]),
    ],
)
def test_causes_come_before_collateral_failures(
    arrived: list[tuple[int, bool]], expected: list[int]
) -> None:
    failures = [failure(rank, collateral=collateral) for rank, collateral in arrived]
    found = cause_first(iter(failures))
    assert list(found) == expected
    assert {rank: found[rank].origin.rank for rank in expected} == {rank: rank for rank in expected}


def test_identical_failures_are_reported_once() -> None:
    same = {rank: failure(rank, "ValueError: same") for rank in (9, 0, 7, 3)}
    others = {4: failure(4, "OSError: disk"), 12: failure(12, "ValueError: other")}
    error = caught(raise_first, {9: same[9], **others, **same})
    assert error.__notes__ == [
        "Raised by rank 9 (local rank 1) on host-1, attempt 2.\n"
        "Also failed: rank 4: OSError: disk\n"
        "Also failed: rank 12: ValueError: other\n"
        "Also failed: ranks 0, 3, 7: ValueError: same"
    ]


def test_a_single_failure_names_its_rank_and_the_users_own_notes_are_kept() -> None:
    error = ValueError("no")
    error.__dict__["__notes__"] = ["mine"]
    raised = caught(raise_first, {2: failure_of(error, origin(2))})
    assert raised.__notes__ == ["mine", "Raised by rank 2 (local rank 0) on host-1, attempt 2."]


@pytest.mark.parametrize("pickled", [None, b"garbage"])
def test_an_exception_that_cannot_be_unpickled_is_reported_in_full(pickled: bytes | None) -> None:
    failed = Failure(origin=origin(1), summary="Odd: no", text="Traceback ...", pickled=pickled)
    error = failed.exception()
    assert type(error) is RemoteError
    assert str(error) == f"{origin(1)}: Odd: no\n\nTraceback ..."
    assert "Traceback ..." in str(error.__cause__)


class TorchsError(RuntimeError):
    """Like torch.distributed.DistBackendError."""

    __module__ = "torch.distributed"


@pytest.mark.parametrize(
    ("error", "collateral"),
    [
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (RuntimeError("[gloo/pair.cc:534] Connection closed by peer [10.0.0.2]:43210"), True),
        (TorchsError("NCCL communicator was aborted on rank 1"), True),
        (TorchsError("shapes differ"), False),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("connection reset by peer"), False),
    ],
)
def test_a_lost_connection_is_collateral(error: Exception, collateral: bool) -> None:
    assert failure_of(error, origin(0)).collateral is collateral


@pytest.mark.parametrize(
    ("how", "summary", "tail"),
    [
        ({"exit_code": 3}, "WorkerDied: exited with code 3", ""),
        ({"signum": signal.SIGKILL}, "WorkerDied: was killed by SIGKILL", "loss 0.3\nand more"),
        ({"signum": 63}, "WorkerDied: was killed by signal 63", "loss 0.3"),
    ],
)
def test_a_dead_process_is_described(how: dict[str, int], summary: str, tail: str) -> None:
    failed = pickle.loads(pickle.dumps(death(origin(3), tail=tail, **how)))
    assert (failed.summary, failed.collateral) == (summary, False)
    error = failed.exception()
    assert isinstance(error, WorkerDied)
    assert (error.exit_code, error.signal) == (how.get("exit_code"), how.get("signum"))
    assert str(error).startswith(f"{origin(3)} {summary.removeprefix('WorkerDied: ')}.")
    assert (f"\nIts last output:\n{tail}" if tail else "\nIt printed nothing.") in str(error)
    assert ("out-of-memory killer" in str(error)) is ("SIGKILL" in summary)


@pytest.mark.parametrize("size", [0, 5000])
def test_a_value_can_be_read_in_parts_and_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(outcome, "PART_BYTES", 1000)
    given = {"weights": bytes(range(250)) * (size // 250), "epoch": 3}
    with tempfile.TemporaryFile() as file:
        oob_pickle.pack(given, file)
        value = Value(4, file)
        parts = list(value.parts())
        assert value.load() == given
        assert list(value.parts()) == parts, "independent of earlier reads"
        assert pickle.loads(b"".join(parts)) == given
        assert [len(part) for part in parts[:-1]] == [1000] * (len(parts) - 1)
