"""Barriers and broadcasts of ``distributor.train.collective``."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.waiting import until

from distributor import DistributorError, TorchDistributor
from distributor.errors import OtherRankFailed
from distributor.rank import store_channel
from distributor.rank.context import TAG_BYTES, worker_context
from distributor.train import collective, get_context
from distributor.train.runtime import session as collectives

pytest.importorskip("torch")
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def run(function: Any, *args: Any, ranks: int = 2, **settings: Any) -> list[Any]:
    return TorchDistributor(ranks, use_gpu=False, timeout=120, **settings).run_all(function, *args)


def test_every_rank_receives_the_object_of_rank_0_or_an_error() -> None:
    """A message to torch's store is limited to 8 MiB, which no object is."""

    def receive() -> list[Any]:
        rank, broadcast = get_context().get_world_rank(), collective.broadcast_from_rank_zero
        data = [broadcast({rank: {1, 2}}), broadcast(data=None if rank == 0 else "other")]
        large = broadcast("x" * 20_000_000 if rank == 0 else None)
        with pytest.raises((TypeError, OtherRankFailed)) as unpicklable:
            broadcast(threading.Lock() if rank == 0 else None)
        collectives.LIMIT = 1000
        with pytest.raises(ValueError, match=r"^Rank 0 broadcasts 2\.02 kB, but at most 1 kB are"):
            broadcast(b"a" * 2000)
        return [*data, len(large), type(unpicklable.value).__name__, broadcast("next")]

    same = [{0: {1, 2}}, None, 20_000_000]
    assert run(receive) == [[*same, "TypeError", "next"], [*same, "OtherRankFailed", "next"]]


def test_an_error_of_one_rank_is_not_waited_for() -> None:
    def fail(offers: list[Any]) -> Any:
        raise OSError("the storage is gone")

    def agree() -> list[str]:
        store_channel.READ_SECONDS = 1.0  # for a rank that does not read an error
        channel = store_channel.StoreChannel.connect()
        with pytest.raises((OSError, OtherRankFailed), match="the storage is gone") as error:
            channel.agree("of a test", 1, fail)
        value = {1} if channel.rank == 1 else 1
        with pytest.raises((TypeError, DistributorError), match="set is not JSON") as other:
            channel.agree("of another", value, len)
        return [type(each.value).__name__ for each in (error, other)]

    assert run(agree) == [["OSError", "DistributorError"], ["OtherRankFailed", "TypeError"]]


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


class Attack:
    """An object that leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_nothing_is_unpickled_that_another_program_has_set_in_the_store(tmp_path: Path) -> None:
    mark = tmp_path / "unpickled"

    def forge(number: int, attack: str) -> None:
        """Do what any program can that reaches rank 0's store."""
        import torch.distributed as dist

        client = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store = dist.PrefixStore("distributor/train", client)
        earlier = store.get(f"collective/{number - 1}")  # before rank 0 removes it
        # As with this rank's own call, rank 0 sets the object now.
        store_channel.StoreChannel.connect().set_own(f"collective/{number}", {"value": None})
        found = store.get(f"collective/{number}")
        pickled = base64.b64encode(pickle.dumps(Attack(mark))).decode()
        forged = json.dumps({"value": {"pickled": pickled}}).encode()
        if attack == "repeated":
            forged = earlier
        elif attack == "changed":
            forged = found[:TAG_BYTES] + forged
        store.set(f"collective/{number}", forged)

    def receive() -> None:
        for at, attack in enumerate(("changed", "untagged", "repeated")):
            assert collective.broadcast_from_rank_zero("before") == "before"
            number = 2 * at + 1
            if get_context().get_world_rank() == 0:
                with contextlib.suppress(DistributorError):  # unless it has read its own before
                    assert collective.broadcast_from_rank_zero("its own") == "its own"
                continue
            forge(number, attack)
            error = rf"^The value of 'collective/{number}' is not what a rank has sent: "
            with pytest.raises(DistributorError, match=error):
                collective.broadcast_from_rank_zero(None)

    run(receive)
    assert not mark.exists()


def test_the_secret_of_the_ranks_differs_by_run_and_is_in_no_variable_or_command_line() -> None:
    def show() -> tuple[bytes, bool]:
        secret = worker_context().secret
        public = [Path("/proc/self", name).read_bytes() for name in ("environ", "cmdline")]
        public += map(os.fsencode, os.environ.values())
        forms = secret, secret.hex().encode(), base64.b64encode(secret)
        return secret, any(form in text for form in forms for text in public)

    first, second = run(show), run(show, ranks=1, warm=False)
    assert first[0] == first[1]
    assert len(first[0][0]) == 32
    assert first[0] != second[0]
    assert not any(is_public for _, is_public in [*first, *second])
