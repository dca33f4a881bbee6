"""A program may initialize its process group again and again, as those with several phases do."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import cloudpickle
import pytest
from conftest import cluster_is_slow
from support.ports import free_port
from support.ranks import Distribute, my_rank

from distributor import TorchDistributor

pytest.importorskip("torch")
cloudpickle.register_pickle_by_value(sys.modules[__name__])
SECONDS = timedelta(seconds=10)
PHASES = 8
"""Without keys of its own, each phase but the first fails about every third time."""


def sum_of_ranks(group: Any = None) -> float:
    import torch
    import torch.distributed as dist

    total = torch.tensor(my_rank() + 1.0)
    dist.all_reduce(total, group=group)
    return total.item()


def phase(late: bool = False, **where: Any) -> list[float]:
    """Use a process group and a second one beside it, and destroy both.

    With `late`, rank 0 destroys them after the other ranks have begun the next phase.
    """
    import time

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=SECONDS, **where)
    sums = [sum_of_ranks(), sum_of_ranks(dist.new_group(timeout=SECONDS))]
    if late and my_rank() == 0:
        time.sleep(0.5)  # nothing shows that they have
    dist.destroy_process_group()
    return sums


def phases() -> list[list[float]]:
    return [phase() for _ in range(PHASES)]


@cluster_is_slow
def test_phases_at_the_address_of_the_run(distribute: Distribute) -> None:
    assert distribute(2).run_all(phases) == [[[3.0, 3.0]] * PHASES] * 2


def phases_elsewhere(port: int, store_port: int) -> list[list[float]]:
    import torch.distributed as dist

    where: dict[str, Any] = {"rank": my_rank(), "world_size": 2}
    store = dist.TCPStore("localhost", store_port, 2, is_master=my_rank() == 0)
    where_else = {"init_method": f"tcp://localhost:{port}", **where}
    sums = [phase(late=number == 0, **where_else) for number in range(PHASES)]
    return sums + [phase(store=store, **where) for _ in range(PHASES)]


def test_phases_at_an_address_and_in_a_store_of_the_program() -> None:
    ranks = TorchDistributor(2, use_gpu=False, timeout=60)
    sums = ranks.run_all(phases_elsewhere, free_port(), free_port())
    assert sums == [[[3.0, 3.0]] * 2 * PHASES] * 2
