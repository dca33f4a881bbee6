"""Files that several ranks report: each is uploaded once; different ones of a name are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch.distributed as dist

from distributor.train.runtime.report_round import assign_among_ranks
from distributor.train.runtime.store_channel import StoreChannel
from distributor.train.storage.checkpoint_store import Assignment

FILES = {f"{number}.distcp": f"file {number}" for number in range(4)}


@pytest.fixture
def assignment_of() -> Callable[..., Assignment]:
    """Return the assignment of one of two ranks, over a store in this process."""
    store = dist.HashStore()

    def assignment(rank: int, of_rank_0: Mapping[str, str] = FILES) -> Assignment:
        channel = StoreChannel(rank, 2, store)
        return assign_among_ranks(channel, "report/0/files", of_rank_0)

    return assignment


def test_each_file_is_uploaded_once(assignment_of: Callable[..., Assignment]) -> None:
    first, second = assignment_of(0)(FILES), assignment_of(1)(FILES)
    turns = [next(first), next(second), next(first)]
    rest = [*second, *first]
    assert turns == [("0.distcp", True), ("2.distcp", True), ("1.distcp", True)]
    assert rest == [("3.distcp", True)]


def test_the_version_of_rank_0_is_uploaded_whoever_comes_first(
    assignment_of: Callable[..., Assignment],
) -> None:
    other = {"1.distcp": "of another node", "only": "there"}
    assert dict(assignment_of(1)(other)) == {"1.distcp": False, "only": True}
    assert dict(assignment_of(0)(FILES)) == dict.fromkeys(FILES, True)
