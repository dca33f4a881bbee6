"""JSON values that ranks exchange through the rendezvous store, beside their collectives."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from distributor.core.text import listed
from distributor.errors import DistributorError, OtherRankFailed
from distributor.rank.context import connect_store, sealed, unsealed, worker_context
from distributor.rank.membership import POLL_SECONDS, REACH_SECONDS, Membership, Party, pause

RANK_TIMEOUT_SECONDS = 1800.0
"""Seconds that a rank waits for the other ranks to report, as in torch's collectives."""
UPLOAD_TIMEOUT_SECONDS = 6 * 3600.0
"""Seconds that a rank waits for the uploads of other ranks, all of which have begun."""
READ_SECONDS = 10.0
"""Seconds for a decision of rank 0 to reach the other ranks."""
STORE_SECONDS = 60.0
"""Seconds for a store to answer to a member, which never waits there for others."""
PART_BYTES = 4 * 1024**2
"""Bytes of a value for one key; torch's store ends a connection that sends 8 MiB at once."""
LATE_WARNING_SECONDS = 60.0
"""Seconds after which rank 0 prints which ranks it is waiting for."""

EQUALLY_OFTEN = "Every rank must call report equally often."


class StoreChannel:
    """Exchanges JSON values between the ranks of a run, or its nodes; to be used by one thread.

    Each value has a tag that only this run's ranks can make.

    All methods raise ConnectionError if rank 0, which holds the store, has ended, and
    DistributorError if other ranks do not take part within a timeout, by default
    `RANK_TIMEOUT_SECONDS`; it names them.
    """

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank, self.size, self._store = rank, size, store
        self.party: Party = tuple((each, 0) for each in range(size))
        self._keys: list[str] = []  # that this rank has set in this round
        self._last_keys: list[str] = []  # and in the one before

    @classmethod
    def connect(
        cls, timeout: float = RANK_TIMEOUT_SECONDS, party: Party | None = None
    ) -> StoreChannel:
        """Return this rank's channel, with a connection of its own and a limit for each answer.

        It is that of a party, by default of all members, in a run whose survivors go on.
        """
        if members := worker_context().membership:
            return MemberChannel(members, members.party if party is None else party)
        store = connect_store("distributor/train", timeout=timedelta(seconds=timeout))
        # The function of `ray_launch` is a rank without these variables.
        rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        return cls(int(rank), int(size), store)

    def get(self, key: str, timeout: float = RANK_TIMEOUT_SECONDS) -> Any:
        """Wait for a value that rank 0 sets for all ranks, and return it."""
        return self._wait_and_get({0: key}, timeout)[0]

    def _wait_and_get(self, keys: dict[int, str], timeout: float) -> list[Any]:
        """Wait for one key of each rank; rank 0 meanwhile prints which ranks are late."""
        start = time.monotonic()
        prints = self.rank == 0 and timeout > LATE_WARNING_SECONDS
        if prints and (missing := self.missing(keys, start + LATE_WARNING_SECONDS)):
            waits = self._waits_for(missing, LATE_WARNING_SECONDS)
            print(f"distributor: {waits} to report, or to upload files.", flush=True)
        if missing := self.missing(keys, start + timeout):
            raise DistributorError(f"{self._waits_for(missing, timeout)}. {EQUALLY_OFTEN}")
        with self._uses_store():
            values = {key: self._read(key) for key in keys.values()}
        return [json.loads(unsealed(key, value)) for key, value in values.items()]

    def _read(self, key: str) -> bytes:
        data = bytes(self._store.get(key))
        if not data.startswith(_PARTS):
            return data
        return b"".join(self._store.get(each) for each in _parts(key, int(data[len(_PARTS) :])))

    def _waits_for(self, missing: list[int], seconds: float) -> str:
        return f"After {seconds:g} s, rank {self.rank} still waits for {listed('rank', missing)}"

    def missing(self, keys: dict[int, str], deadline: float) -> list[int]:
        """Wait until all keys are set; return the ranks whose keys are missing at the deadline."""
        left = max(0.001, deadline - time.monotonic())
        with contextlib.suppress(Exception):  # timeout, or rank 0 has ended
            self._store.wait(list(keys.values()), timedelta(seconds=left))
            return []
        return [rank for rank, key in keys.items() if not self.has(key)]

    def has(self, key: str) -> bool:
        return self._have([key])

    def _have(self, keys: list[str]) -> bool:
        with self._uses_store():
            return bool(self._store.check(keys))

    def set(self, key: str, value: Any) -> None:
        """Set a value for all ranks; used by rank 0 for its decisions."""
        data = self._stored(key, value)
        with self._uses_store():
            self._store.set(key, data)

    def _stored(self, key: str, value: Any) -> bytes:
        """Return the data for a value's key; store the value in parts if it is large."""
        data = sealed(key, json.dumps(value).encode())
        parts = _parts(key, -(-len(data) // PART_BYTES)) if len(data) > PART_BYTES else []
        self._keys += [key, *parts]
        with self._uses_store():
            for number, part in enumerate(parts):
                self._store.set(part, data[number * PART_BYTES : (number + 1) * PART_BYTES])
        return b"%s%d" % (_PARTS, len(parts)) if parts else data

    @contextlib.contextmanager
    def _uses_store(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise ConnectionError(
                f"Rank {self.rank} has lost rank 0, through which ranks report."
            ) from error

    def set_own(self, key: str, value: Any) -> None:
        """Set this rank's value for a key for which every rank sets a value."""
        own = f"{key}/{self.rank}"
        try:
            self.set(own, value)
        except (TypeError, ValueError) as error:  # it is not JSON
            self.set(own, {"failed": f"rank {self.rank}: {error}"})
            raise

    def gather(self, key: str, timeout: float = RANK_TIMEOUT_SECONDS) -> list[Any]:
        """Wait for every rank's value, and return all in rank order."""
        keys = {rank: f"{key}/{rank}" for rank in range(self.size)}
        values = self._wait_and_get(keys, timeout)
        for value in values:
            if isinstance(value, dict) and "failed" in value:
                raise OtherRankFailed(value["failed"])
        return values

    def set_first(self, key: str, value: str) -> str:
        """Set a value unless another rank has; return the one that was set first."""
        with self._uses_store():
            first: str = self._store.compare_set(key, "", value).decode()
        if first == value:
            self._keys.append(key)
        return first

    def delete_keys(self) -> None:
        """End a round, and delete the keys of the one before: they do not accumulate in the store.

        Those of the round that ends stay, because other ranks may not have read them yet.
        """
        for key in self._last_keys:
            with contextlib.suppress(Exception):  # if rank 0 has ended, the next call raises
                self._store.delete_key(key)
        self._last_keys, self._keys = self._keys, []

    def agree(
        self,
        key: str,
        value: Any,
        decide: Callable[[list[Any]], Any],
        timeout: float = RANK_TIMEOUT_SECONDS,
    ) -> Any:
        """Wait until all ranks have reached this call, and return what rank 0 decides.

        `value` is this rank's contribution; `decide` is called on rank 0 with those of all ranks.
        A DistributorError is raised on all ranks, also if `decide` raises it.
        """
        decision = self._await_decision(key, value, decide, timeout)
        for name, kind in (("failed", OtherRankFailed), ("error", DistributorError)):
            if name in decision:
                self.await_readers(key)
                raise kind(decision[name])
        return decision["value"]

    def _await_decision(
        self, key: str, value: Any, decide: Callable[[list[Any]], Any], timeout: float
    ) -> Any:
        self.set_own(key, {"value": value})
        # Rank 0 may take `timeout` itself, because it waits for the other ranks. Therefore their
        # own time starts anew when rank 0 has reached this call.
        if self.rank == 0:
            self._decide(key, decide, timeout)
        else:
            self.get(f"{key}/begun", timeout)
        return self.get(key, timeout + READ_SECONDS)

    def _decide(self, key: str, decide: Callable[[list[Any]], Any], timeout: float) -> None:
        self.set(f"{key}/begun", None)
        try:
            offers = self.gather(key, timeout)
            if left := [each["left"] for each in offers if "left" in each]:
                raise DistributorError(_alone(left))
            self._set_decision(key, {"value": decide([each["value"] for each in offers])})
        except (ConnectionError, _MemberLost):
            raise
        except DistributorError as error:
            self._set_decision(key, {"error": str(error)})
        except Exception as error:  # the others do not wait for what does not come
            failed = f"Rank 0 failed: {type(error).__name__}: {error}"
            self._set_decision(key, {"failed": failed})
            self.await_readers(key)
            raise

    def _set_decision(self, key: str, decision: Mapping[str, Any]) -> None:
        self.set(key, decision)

    def await_readers(self, key: str) -> None:
        """Report to rank 0 that this rank has read an error; on rank 0, wait for the others.

        Rank 0 raises the error too, and the store ends with it: a rank that had not read the error
        would raise a `ConnectionError` instead.
        """
        with contextlib.suppress(ConnectionError, _MemberLost):
            self.set(f"{key}/read/{self.rank}", None)
            if self.rank == 0:
                keys = {rank: f"{key}/read/{rank}" for rank in range(self.size)}
                self.missing(keys, time.monotonic() + READ_SECONDS)

    def leave(self, key: str, why: str) -> None:
        """Let the other ranks' calls of `agree` with this key fail: this rank will not call it."""
        if self.rank == 0:
            self.set(f"{key}/begun", None)
            self.set(key, {"error": _alone([f"rank 0 {why}"])})
        else:
            self.set_own(key, {"left": f"rank {self.rank} {why}"})


class _MemberLost(Exception):
    """A rank that takes part in an agreement is lost before there is a decision."""


class MemberChannel(StoreChannel):
    """A channel of members that make a decision again, without those that are lost.

    The first thing that is set for a decision is valid for all of them: the decision, or that there
    is none in this party. So no member goes on with a decision that others do not know.
    """

    def __init__(self, members: Membership, party: Party) -> None:
        self._members = members
        self._enter(party)

    def _enter(self, party: Party) -> None:
        prefix = f"distributor/train/{hashlib.sha256(repr(party).encode()).hexdigest()}"
        store, deadline = None, time.monotonic() + RANK_TIMEOUT_SECONDS
        with self._uses_store():
            while store is None:
                try:  # briefly: if that store has just been lost, newer members have another one
                    limit = timedelta(seconds=REACH_SECONDS)
                    store = connect_store(prefix, self._members.store, timeout=limit)
                except RuntimeError:
                    if time.monotonic() > deadline:
                        raise
            store.set_timeout(timedelta(seconds=STORE_SECONDS))
        super().__init__(self._members.place_in(party), len(party), store)
        self.party = party

    def missing(self, keys: dict[int, str], deadline: float) -> list[int]:
        began, names = time.monotonic(), list(keys.values())
        while not self._have(names):
            self._members.attend()
            if self._members.left_of(self.party) != self.party:
                raise _MemberLost
            if time.monotonic() > deadline:
                return [rank for rank, key in keys.items() if not self.has(key)]
            pause(began)
        return []

    def _await_decision(
        self, key: str, value: Any, decide: Callable[[list[Any]], Any], timeout: float
    ) -> Any:
        while True:
            try:
                decision = super()._await_decision(key, value, decide, timeout)
            except _MemberLost:
                self._set_decision(key, {"lost": True})
                decision = self.get(key)
            if "lost" not in decision:
                return decision
            while (left := self._members.left_of(self.party)) == self.party:
                time.sleep(POLL_SECONDS)  # another member has known it earlier
            self._enter(left)

    def _set_decision(self, key: str, decision: Mapping[str, Any]) -> None:
        data = self._stored(key, decision)
        with self._uses_store():
            self._store.compare_set(key, "", data)

    @contextlib.contextmanager
    def _uses_store(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            reason = "the store was lost during a report or a collective of distributor.train"
            self._members.refuse(reason)
            raise ConnectionError(f"A rank was lost: {reason}.") from error


_PARTS = b"parts "


def _parts(key: str, count: int) -> list[str]:
    return [f"{key}/part {number}" for number in range(count)]


def _alone(left: list[str]) -> str:
    return f"{' and '.join(left)}, but other ranks report once more. {EQUALLY_OFTEN}"
