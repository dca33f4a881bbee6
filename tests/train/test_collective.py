"""Barriers and broadcasts of ``distributor.train.collective``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.waiting import until

from distributor import DistributorError, TorchDistributor
from distributor.train import collective, get_context
from distributor.train.runtime import collectives, store_channel

pytest.importorskip("torch")
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def run(function: Any, *args: Any, ranks: int = 2) -> list[Any]:
    return TorchDistributor(ranks, use_gpu=False, timeout=120).run_all(function, *args)


def test_every_rank_receives_the_object_of_rank_0() -> None:
    def receive() -> list[Any]:
        rank = get_context().get_world_rank()
        data = [collective.broadcast_from_rank_zero({rank: {1, 2}}) for _ in range(3)]
        return [*data, collective.broadcast_from_rank_zero(data=None if rank == 0 else "other")]

    assert run(receive) == [[{0: {1, 2}}] * 3 + [None]] * 2


def test_no_rank_passes_a_barrier_before_all_have_come(tmp_path: Path) -> None:
    def wait() -> list[str]:
        rank = get_context().get_world_rank()
        if rank == 2:
            until((tmp_path / "others wait").exists, "the other ranks have come", 60)
            (tmp_path / "come").touch()
        else:
            (tmp_path / "others wait").touch()
        collective.barrier()
        return sorted(path.name for path in tmp_path.iterdir())

    assert run(wait, ranks=3) == [["come", "others wait"]] * 3


def test_an_object_that_is_too_large_is_an_error_on_all_ranks() -> None:
    def send() -> list[str]:
        collectives.LIMIT = 1000
        errors = []
        for size in (2000, 10):
            try:
                collective.broadcast_from_rank_zero(b"a" * size)
            except ValueError as error:
                errors.append(str(error))
        return errors

    for errors in run(send):
        assert len(errors) == 1
        assert errors[0].startswith("Rank 0 broadcasts 2.02 kB, but at most 1 kB are"), errors


def test_ranks_that_do_not_come_are_named() -> None:
    def wait() -> str:
        store_channel.RANK_TIMEOUT_SECONDS = 1.0
        if get_context().get_world_rank() == 1:
            return "returned"
        with pytest.raises(DistributorError) as late:
            collective.barrier()
        return str(late.value)

    late, returned = run(wait)
    assert returned == "returned"
    assert "rank 0 still waits for rank 1" in late


def test_outside_a_run_there_is_nothing_to_wait_for() -> None:
    for call in (collective.barrier, lambda: collective.broadcast_from_rank_zero(1)):
        with pytest.raises(RuntimeError, match=r"collective can only be called by the ranks"):
            call()
