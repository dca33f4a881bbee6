"""Preemption notices: each is reported at the same call in all ranks, before a process ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field

from distributor.core.addresses import host_name
from distributor.errors import DistributorError
from distributor.train.runtime.store_channel import StoreChannel

AGREEMENT_TIMEOUT_SECONDS = 30.0
"""Seconds for all ranks to agree on a call; if they do not, the notice is ignored."""


@dataclass(frozen=True)
class Agreement:
    """What all ranks agree on for a notice."""

    call: int  # at which it is due, from 1; 0 for none
    ranks: Mapping[str, list[int]] = field(default_factory=dict)  # of hosts that lose a process


Agree = Callable[[int, int, bool], Agreement]
"""Takes a notice's number, the number of calls that this rank has begun, and whether its host is
about to lose a process."""


class NoticeTracker:
    """Determines the call at which each notice is due, the same in all ranks.

    Until a notice comes, a call costs a lock and an addition. Then each rank publishes, on a thread
    of its own, how many calls it has begun, and waits at its next call for the numbers of the
    others. The notice is due at the first call that no rank had begun, so that a rank that is ahead
    never waits for a rank that waits for it.
    """

    def __init__(self, agree: Agree) -> None:
        self._agree = agree
        self._lock = threading.Lock()
        self._calls = 0
        self._notices: list[Future[Agreement]] = []
        self.was_due = False  # whether a notice has been due at a call by now

    def receive(self, here: bool) -> None:
        """Receive a notice on any thread; `here`: whether this host is about to lose a process."""
        agreement: Future[Agreement] = Future()
        with self._lock:
            number, calls = len(self._notices), self._calls

            def settle() -> None:
                agreement.set_result(self._agree(number, calls, here))

            threading.Thread(target=settle, name="notice", daemon=True).start()
            self._notices.append(agreement)

    def is_due(self) -> bool:
        """Count a call, and return whether a notice is due at it."""
        call, agreements = self._count_call()
        return call in [each.call for each in agreements]

    def preempted_ranks(self) -> dict[str, list[int]] | None:
        """Count a call, and return the hosts and ranks of all notices due by now; None if none."""
        call, agreements = self._count_call()
        due = [each.ranks for each in agreements if 0 < each.call <= call]
        return {host: list(ranks[host]) for ranks in due for host in ranks} if due else None

    def _count_call(self) -> tuple[int, list[Agreement]]:
        with self._lock:
            self._calls += 1
            call, notices = self._calls, list(self._notices)
        agreements = [each.result() for each in notices]
        self.was_due = self.was_due or any(0 < each.call <= call for each in agreements)
        return call, agreements


def agree(name: str, number: int, calls: int, here: bool) -> Agreement:
    """Agree with all ranks on the call of the function `name` at which a notice is due.

    All ranks adopt the first recorded decision. A rank that has waited in vain for a late one
    records that there is none, and has not gone beyond the call at which the notice would otherwise
    be due.
    """
    key = f"{name}/{number}"
    try:
        channel = StoreChannel.connect(AGREEMENT_TIMEOUT_SECONDS)
        channel.set_own(key, {"calls": calls, "host": host_name() if here else None})
        decision = json.dumps(asdict(_gather_calls(channel, key, name)))
        return Agreement(**json.loads(channel.set_first(f"{key}/decision", decision)))
    except Exception as error:
        _warn(name, error)
        return Agreement(0)


def _gather_calls(channel: StoreChannel, key: str, name: str) -> Agreement:
    try:
        answers = channel.gather(key, AGREEMENT_TIMEOUT_SECONDS)
    except DistributorError as error:
        _warn(name, error)
        return Agreement(0)
    ranks: dict[str, list[int]] = {}
    for rank, answer in enumerate(answers):
        if answer["host"] is not None:
            ranks.setdefault(answer["host"], []).append(rank)
    return Agreement(1 + max(answer["calls"] for answer in answers), ranks)


def _warn(name: str, error: Exception) -> None:
    problem = f"this run is about to lose a process, but {name} cannot report it"
    print(f"distributor: {problem} at the same call in all ranks: {error}", flush=True)
