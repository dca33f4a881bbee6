"""A notice of preemption is due at the same call of `is_preempted` in all ranks."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import cloudpickle
from support.waiting import until

from distributor import TorchDistributor, train
from distributor.core.addresses import use_host_name
from distributor.rank.context import worker_context
from distributor.train.runtime import preemption
from distributor.train.runtime.preemption import Agreement, NoticeTracker

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_a_notice_that_reaches_a_rank_too_late_is_ignored_by_all(tmp_path: Path) -> None:
    timed_out = tmp_path / "timed out"

    def subscribe() -> list[bool]:
        preemption.AGREEMENT_TIMEOUT_SECONDS = 1.0
        rank = train.get_context().get_world_rank()
        answers = [train.is_preempted()]
        if rank == 1:
            until(timed_out.exists, "the other rank gives up", 60)
        worker_context().preemption_notices.notify(here=False)
        answers += [train.is_preempted() for _ in range(3)]
        timed_out.touch()
        return answers

    answers = TorchDistributor(2, use_gpu=False, timeout=120).run_all(subscribe)
    assert answers == [[False] * 4] * 2


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


def test_two_notices_are_each_due_at_one_call_although_one_rank_is_ahead() -> None:
    """The second notice comes once all ranks have finished the first."""
    calls_before_notice, barrier = [5, 9, 7], threading.Barrier(3, timeout=30)
    published: list[list[int]] = [[], []]
    lock, complete = threading.Lock(), [threading.Event(), threading.Event()]

    def agree(number: int, calls: int, here: bool) -> Agreement:
        with lock:
            published[number].append(calls)
            if len(published[number]) == 3:
                complete[number].set()
        assert complete[number].wait(30)
        return Agreement(max(published[number]) + 1)

    due_calls: list[list[int]] = [[], [], []]

    def run_rank(rank: int) -> None:
        notices = NoticeTracker(agree)
        answers = [notices.is_due() for _ in range(calls_before_notice[rank])]
        notices.receive(here=False)
        answers += [notices.is_due() for _ in range(10 - calls_before_notice[rank] + 1)]
        barrier.wait()
        notices.receive(here=False)
        answers += [notices.is_due() for _ in range(5)]
        due_calls[rank] = [call for call, is_due in enumerate(answers, 1) if is_due]

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert due_calls == [[10, 12]] * 3
