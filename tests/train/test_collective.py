"""Barriers and broadcasts of ``distributor.train.collective``."""

from __future__ import annotations

import base64
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
from distributor.rank.context import TAG_BYTES, worker_context
from distributor.train import collective, get_context
from distributor.train.runtime import collectives, store_channel

pytest.importorskip("torch")
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def run(function: Any, *args: Any, ranks: int = 2, **settings: Any) -> list[Any]:
    return TorchDistributor(ranks, use_gpu=False, timeout=120, **settings).run_all(function, *args)


def test_every_rank_receives_the_object_of_rank_0() -> None:
    def receive() -> list[Any]:
        rank = get_context().get_world_rank()
        data = [collective.broadcast_from_rank_zero({rank: {1, 2}}) for _ in range(3)]
        return [*data, collective.broadcast_from_rank_zero(data=None if rank == 0 else "other")]

    assert run(receive) == [[{0: {1, 2}}] * 3 + [None]] * 2


def test_an_object_of_many_megabytes_is_received() -> None:
    def receive() -> list[int]:
        """Return the sizes: that of a message to torch's store is limited to 8 MiB."""
        data = "x" * 20_000_000 if get_context().get_world_rank() == 0 else None
        return [len(collective.broadcast_from_rank_zero(data)) for _ in range(2)]

    assert run(receive) == [[20_000_000] * 2] * 2


def test_an_object_that_cannot_be_pickled_is_an_error_on_all_ranks() -> None:
    def send() -> str:
        data = threading.Lock() if get_context().get_world_rank() == 0 else None
        with pytest.raises((TypeError, OtherRankFailed)) as error:
            collective.broadcast_from_rank_zero(data)
        assert collective.broadcast_from_rank_zero("next") == "next"
        return type(error.value).__name__

    assert run(send) == ["TypeError", "OtherRankFailed"]


def test_an_error_of_one_rank_is_not_waited_for() -> None:
    def agree() -> str:
        def fail(offers: list[Any]) -> Any:
            raise OSError("the storage is gone")

        channel = store_channel.StoreChannel.connect()
        with pytest.raises((OSError, OtherRankFailed), match="the storage is gone") as error:
            channel.agree("of a test", 1, fail)
        value = {1} if channel.rank == 1 else 1
        with pytest.raises((TypeError, DistributorError), match="set is not JSON") as other:
            channel.agree("of another", value, len)
        return f"{type(error.value).__name__} {type(other.value).__name__}"

    assert run(agree) == ["OSError DistributorError", "OtherRankFailed TypeError"]


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


class Attack:
    """An object that leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("attack", ["changed", "untagged", "repeated"])
def test_nothing_is_unpickled_that_another_program_has_set_in_the_store(
    tmp_path: Path, attack: str
) -> None:
    mark = tmp_path / "unpickled"

    def forge() -> None:
        """Do what any program can that reaches rank 0's store."""
        import torch.distributed as dist

        client = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store = dist.PrefixStore("distributor/train", client)
        found = store.get("collective/1/data")
        pickled = base64.b64encode(pickle.dumps(Attack(mark))).decode()
        forged = json.dumps({"pickled": pickled}).encode()
        if attack == "repeated":
            forged = store.get("collective/0/data")
        elif attack == "changed":
            forged = found[:TAG_BYTES] + forged
        store.set("collective/1/data", forged)

    def receive() -> str:
        assert collective.broadcast_from_rank_zero("first") == "first"
        if get_context().get_world_rank() == 1:
            forge()  # rank 0 has set the object, and waits for this rank
        with pytest.raises(DistributorError) as caught:
            collective.broadcast_from_rank_zero("second")
        assert collective.broadcast_from_rank_zero("third") == "third"
        return str(caught.value)

    for error in run(receive):
        assert error.startswith("The value of 'collective/1/data' is not what a rank has sent: ")
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
