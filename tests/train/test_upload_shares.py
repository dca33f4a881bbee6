"""Files that several ranks report: each is brought once, and what only looks alike is compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from distributor.train.runtime.store_channel import StoreChannel
from distributor.train.storage.upload_shares import Share, everything, identity_of, shared

FILES = {f"{number}.distcp": f"file {number}" for number in range(4)}


@pytest.fixture
def share_of() -> Callable[[int], Share]:
    """Give the share of a rank among two that meet in a store of this process."""
    store = dist.HashStore()
    return lambda rank: shared(StoreChannel(rank, 2, store), "report/0/files")


def test_alone_a_rank_brings_all() -> None:
    assert list(everything(FILES)) == [(name, True) for name in FILES]


def test_each_file_is_brought_once(share_of: Callable[[int], Share]) -> None:
    first, second = share_of(0)(FILES), share_of(1)(FILES)
    turns = [next(first), next(second), next(first)]
    rest = [*second, *first]
    assert turns == [("0.distcp", True), ("2.distcp", True), ("1.distcp", True)]
    assert rest == [("3.distcp", True)]


def test_another_file_of_the_same_name_is_compared(share_of: Callable[[int], Share]) -> None:
    other = {**FILES, "1.distcp": "of another node"}
    assert dict(share_of(0)(FILES)) == dict.fromkeys(FILES, True)
    assert list(share_of(1)(other)) == [("1.distcp", False)]


def test_a_file_is_known_by_all_its_names(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_text("x")
    (tmp_path / "b").write_text("x")
    (tmp_path / "again").symlink_to(tmp_path / "folder")
    assert identity_of(tmp_path / "again" / "a") == identity_of(tmp_path / "folder" / "a")
    assert identity_of(tmp_path / "b") != identity_of(tmp_path / "folder" / "a")
