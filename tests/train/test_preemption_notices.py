"""A notice of preemption is due at the same call of `is_preempted` in all ranks."""

from __future__ import annotations

import sys

import cloudpickle

from distributor import TorchDistributor, train
from distributor.core.addresses import use_host_name
from distributor.rank.context import worker_context

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_notices_to_all_ranks_are_due_at_one_call() -> None:
    def subscribe() -> tuple[list[bool], list[train.PreemptionInfo | None]]:
        rank = train.get_context().get_world_rank()
        use_host_name("a" if rank == 0 else "b")
        infos = [train.get_preemption_info()]
        answers = [train.is_preempted() for _ in range(3 * rank)]
        worker_context().preemption_notices.notify(here=rank > 0)
        answers += [train.is_preempted() for _ in range(10 - 3 * rank)]
        infos += [train.get_preemption_info() for _ in range(2)]
        worker_context().preemption_notices.notify(here=rank == 0)
        return answers, [*infos, train.get_preemption_info()]

    for answers, infos in TorchDistributor(3, use_gpu=False, timeout=120).run_all(subscribe):
        assert answers == [False] * 6 + [True] + [False] * 3
        first = train.PreemptionInfo(None, {"b": [1, 2]})
        second = train.PreemptionInfo(None, {"a": [0], "b": [1, 2]})
        assert infos == [None, first, first, second]
