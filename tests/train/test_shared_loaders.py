"""What a data loader yields if members change, without other processes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from distributor.rank.context import WorkerContext, enter_worker, worker_context
from distributor.rank.membership import Membership
from distributor.train.torch import prepare_data_loader


def test_an_epoch_ends_of_whose_interrupted_step_no_batch_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of 4 rows for each of 2 ranks; once a third one has joined, there are 3 for each."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    context, members = WorkerContext(), Membership(0, 2, lambda _: None, ("", 0), lambda: None)
    context.membership = members
    before = worker_context()
    enter_worker(context)
    try:
        own = DataLoader(torch.arange(8), batch_size=4, drop_last=True)
        for _ in (loader := prepare_data_loader(own)):
            members.generation, members.size, members.is_void = 1, 3, True
        assert not members.is_void, "what follows the epoch is of no interrupted iteration"
        assert len(loader) == 0
    finally:
        enter_worker(before)
