"""What ranks say to each other beside their collectives: words in the rendezvous store."""

from __future__ import annotations

import contextlib
import json
import os
import time
from datetime import timedelta
from typing import Any

from distributor import runtime
from distributor.errors import DistributorError
from distributor.wire.wording import listed

WAIT_SECONDS = 1800.0
"""Seconds that a report waits for the other ranks, as torch's collectives do."""
UPLOAD_SECONDS = 6 * 3600.0
"""Seconds that a report waits for the others' files: each rank has come, and is at work."""
TELL_SECONDS = 60.0
"""Seconds after which it is told who is waited for."""


class Words:
    """A rank's words in a store; for one thread.

    Parameters
    ----------
    rank, size : int
        Who speaks, among how many.
    store : torch.distributed.Store
        Where.
    """

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank, self.size, self._store = rank, size, store
        self._mine: list[str] = []
        self._of_round: list[str] = []
        self._of_last_round: list[str] = []

    @classmethod
    def here(cls, seconds: float = WAIT_SECONDS) -> Words:
        """Give this rank's, by a connection of their own to the run's store.

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

    def tell(self, about: str, words: Any) -> None:
        """Tell all, as rank 0 does what it has decided.

        Raises
        ------
        ConnectionError
            Where rank 0, which keeps the words, has gone.
        """
        self._of_round.append(about)
        self._set(about, words)

    def hear(self, about: str, patience: float | None = None) -> Any:
        """Hear what rank 0 has told to all.

        Parameters
        ----------
        about : str
            What it is about.
        patience : float, optional
            Seconds to wait for it; by default `WAIT_SECONDS`.

        Raises
        ------
        DistributorError
            Where it does not come; names who is waited for.
        ConnectionError
            Where rank 0, which keeps the words, has gone.
        """
        return self._heard({0: about}, patience)[0]

    def _heard(self, told: dict[int, str], patience: float | None) -> list[Any]:
        """Wait for words of ranks; rank 0 tells meanwhile who keeps the others waiting."""
        began = time.monotonic()
        patience = WAIT_SECONDS if patience is None else patience
        tells = self.rank == 0 and patience > TELL_SECONDS
        if tells and (missing := self._missing(told, began + TELL_SECONDS)):
            waits = self._waits_for(missing, TELL_SECONDS)
            print(f"distributor: {waits} to report, or to bring files to storage.", flush=True)
        if missing := self._missing(told, began + patience):
            raise DistributorError(
                f"{self._waits_for(missing, patience)}. Every rank has to call report as often as "
                "the others."
            )
        return [json.loads(self._get(about)) for about in told.values()]

    def _waits_for(self, missing: list[int], seconds: float) -> str:
        return f"After {seconds:g} s, rank {self.rank} still waits for {listed('rank', missing)}"

    def _missing(self, told: dict[int, str], deadline: float) -> list[int]:
        """Wait for words of ranks; give the ranks whose have not come by then."""
        left = max(0.001, deadline - time.monotonic())
        with contextlib.suppress(Exception):  # it took too long, or rank 0 has gone
            self._store.wait(list(told.values()), timedelta(seconds=left))
            return []
        return [rank for rank, about in told.items() if not self._is_there(about)]

    def _is_there(self, about: str) -> bool:
        try:
            return bool(self._store.check([about]))
        except Exception as error:
            raise self._lost() from error

    def _get(self, about: str) -> bytes:
        try:
            return bytes(self._store.get(about))
        except Exception as error:
            raise self._lost() from error

    def _set(self, about: str, words: Any) -> None:
        try:
            self._store.set(about, json.dumps(words))
        except Exception as error:
            raise self._lost() from error

    def _lost(self) -> ConnectionError:
        return ConnectionError(f"Rank {self.rank} has lost rank 0, through which ranks report.")

    def tell_mine(self, about: str, words: Any) -> None:
        """Tell what this rank has to say, as every rank does."""
        self._mine.append(f"{about}/{self.rank}")
        self._set(self._mine[-1], words)

    def hear_all(self, about: str, patience: float | None = None) -> list[Any]:
        """Hear what every rank has said, in the order of ranks; raises as `hear` does."""
        return self._heard({rank: f"{about}/{rank}" for rank in range(self.size)}, patience)

    def claim(self, about: str, words: str) -> str:
        """Say what one rank alone may say; give what was said first."""
        try:
            first: str = self._store.compare_set(about, "", words).decode()
        except Exception as error:
            raise self._lost() from error
        if first == words:
            self._mine.append(about)
        return first

    def forget(self) -> None:
        """Take this round's words away, whose end this rank has heard; a long training has many.

        What rank 0 told to all stays for a round more: others may not have heard it yet.
        """
        for about in (*self._mine, *self._of_last_round):
            with contextlib.suppress(Exception):  # whoever goes on notices that rank 0 has gone
                self._store.delete_key(about)
        self._mine, self._of_last_round, self._of_round = [], self._of_round, []

    def meet(self, about: str) -> None:
        """Wait until all ranks have come to this.

        Raises
        ------
        DistributorError
            Where one does not; names who is waited for.
        """
        self.tell_mine(about, None)
        if self.rank == 0:
            self.tell(about, self._missed(about))
        if missed := self.hear(about):
            raise DistributorError(missed)

    def _missed(self, about: str) -> str | None:
        try:
            self.hear_all(about)
        except DistributorError as error:
            return str(error)
        return None
