"""Outcomes of ranks: failures are captured, ordered, reported and raised again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from distributor.serialization.outcome import (
    Failure,
    Origin,
    cause_first,
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
