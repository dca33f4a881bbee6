"""What ranks exchange beside their collectives: values in the rendezvous store."""

from __future__ import annotations

import contextlib
import json
import os
import time
from datetime import timedelta
from typing import Any

from distributor import runtime
from distributor.core.text import listed
from distributor.errors import DistributorError

WAIT_SECONDS = 1800.0
"""Seconds that a report waits for the other ranks, as torch's collectives do."""
UPLOAD_SECONDS = 6 * 3600.0
"""Seconds that a report waits for the files of other ranks, all of which have begun to write."""
LATE_SECONDS = 60.0
"""Seconds after which rank 0 prints which ranks it waits for."""


class StoreChannel:
    """Exchanges JSON values between the ranks of a run; to be used by one thread.

    Parameters
    ----------
    rank, size : int
        This rank, and the number of ranks.
    store : torch.distributed.Store
        The store that holds the values.
    """

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank, self.size, self._store = rank, size, store
        self._own_keys: list[str] = []
        self._round_keys: list[str] = []
        self._last_round_keys: list[str] = []

    @classmethod
    def here(cls, seconds: float = WAIT_SECONDS) -> StoreChannel:
        """Return this rank's channel, over a connection of its own to the run's store.

        Parameters
        ----------
        seconds : float
            How long the store may take to answer.
        """
        import torch.distributed as dist

        client = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
        )
        store = dist.PrefixStore("distributor/train", client)  # type: ignore[attr-defined]
        return cls(runtime.get_global_rank(), runtime.get_world_size(), store)

    def set(self, key: str, value: Any) -> None:
        """Set a value for all ranks, as rank 0 does with what it has decided.

        Raises
        ------
        ConnectionError
            If rank 0, which holds the store, has gone.
        """
        self._round_keys.append(key)
        self._set(key, value)

    def get(self, key: str, timeout: float | None = None) -> Any:
        """Wait for a value that rank 0 sets for all ranks, and return it.

        Parameters
        ----------
        key : str
            Its key.
        timeout : float, optional
            Seconds to wait for it; by default `WAIT_SECONDS`.

        Raises
        ------
        DistributorError
            If it is not set in time; names the ranks that are waited for.
        ConnectionError
            If rank 0, which holds the store, has gone.
        """
        return self._wait_and_get({0: key}, timeout)[0]

    def _wait_and_get(self, keys: dict[int, str], timeout: float | None) -> list[Any]:
        """Wait for one key of each rank; rank 0 meanwhile prints which ranks are late."""
        began = time.monotonic()
        timeout = WAIT_SECONDS if timeout is None else timeout
        prints = self.rank == 0 and timeout > LATE_SECONDS
        if prints and (missing := self._missing(keys, began + LATE_SECONDS)):
            waits = self._waits_for(missing, LATE_SECONDS)
            print(f"distributor: {waits} to report, or to bring files to storage.", flush=True)
        if missing := self._missing(keys, began + timeout):
            raise DistributorError(
                f"{self._waits_for(missing, timeout)}. Every rank has to call report as often as "
                "the others."
            )
        return [json.loads(self._get(key)) for key in keys.values()]

    def _waits_for(self, missing: list[int], seconds: float) -> str:
        return f"After {seconds:g} s, rank {self.rank} still waits for {listed('rank', missing)}"

    def _missing(self, keys: dict[int, str], deadline: float) -> list[int]:
        """Wait until all keys are set; return the ranks whose keys are not by the deadline."""
        left = max(0.001, deadline - time.monotonic())
        with contextlib.suppress(Exception):  # it took too long, or rank 0 has gone
            self._store.wait(list(keys.values()), timedelta(seconds=left))
            return []
        return [rank for rank, key in keys.items() if not self._is_set(key)]

    def _is_set(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except Exception as error:
            raise self._lost() from error

    def _get(self, key: str) -> bytes:
        try:
            return bytes(self._store.get(key))
        except Exception as error:
            raise self._lost() from error

    def _set(self, key: str, value: Any) -> None:
        try:
            self._store.set(key, json.dumps(value))
        except Exception as error:
            raise self._lost() from error

    def _lost(self) -> ConnectionError:
        return ConnectionError(f"Rank {self.rank} has lost rank 0, through which ranks report.")

    def set_own(self, key: str, value: Any) -> None:
        """Set this rank's value under a key that every rank has a value for."""
        self._own_keys.append(f"{key}/{self.rank}")
        self._set(self._own_keys[-1], value)

    def gather(self, key: str, timeout: float | None = None) -> list[Any]:
        """Wait for every rank's value, and return them in rank order; raises as `get` does."""
        return self._wait_and_get({rank: f"{key}/{rank}" for rank in range(self.size)}, timeout)

    def set_first(self, key: str, value: str) -> str:
        """Set a value unless another rank has; return the one that was set first."""
        try:
            first: str = self._store.compare_set(key, "", value).decode()
        except Exception as error:
            raise self._lost() from error
        if first == value:
            self._own_keys.append(key)
        return first

    def delete_keys(self) -> None:
        """Delete this round's keys, once this rank has seen its end: long trainings have many.

        What rank 0 set for all stays for one more round: others may not have read it yet.
        """
        for key in (*self._own_keys, *self._last_round_keys):
            with contextlib.suppress(Exception):  # if rank 0 has gone, the next call notices
                self._store.delete_key(key)
        self._own_keys, self._last_round_keys, self._round_keys = [], self._round_keys, []

    def barrier(self, key: str) -> None:
        """Wait until all ranks have come to this call.

        Raises
        ------
        DistributorError
            If one does not; names the ranks that are waited for.
        """
        self.set_own(key, None)
        if self.rank == 0:
            self.set(key, self._late(key))
        if late := self.get(key):
            raise DistributorError(late)

    def _late(self, key: str) -> str | None:
        try:
            self.gather(key)
        except DistributorError as error:
            return str(error)
        return None
