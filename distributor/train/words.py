"""What ranks say to each other beside their collectives: words in the rendezvous store."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any

from distributor import runtime
from distributor.errors import DistributorError

WAIT_SECONDS = 1800.0
"""Seconds that a report waits for the other ranks, as torch's collectives do."""


class Words:
    """A rank's connection to the store; for one thread.

    Attributes
    ----------
    rank, size : int
        Who speaks, among how many.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self.rank, self.size = runtime.get_global_rank(), runtime.get_world_size()
        client = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=WAIT_SECONDS),
        )
        self._store = dist.PrefixStore("distributor/train", client)  # type: ignore[attr-defined]

    def tell(self, about: str, words: Any) -> None:
        """Tell all, as rank 0 does what it has decided.

        Raises
        ------
        ConnectionError
            Where rank 0, which keeps the words, has gone.
        """
        try:
            self._store.set(about, json.dumps(words))
        except Exception as error:
            raise self._lost() from error

    def hear(self, about: str, of: int = 0) -> Any:
        """Hear what was told to all.

        Raises
        ------
        DistributorError
            Where it does not come; names who is waited for.
        ConnectionError
            Where rank 0, which keeps the words, has gone.
        """
        until = time.monotonic() + WAIT_SECONDS
        try:
            self._store.wait([about], timedelta(seconds=WAIT_SECONDS))
            return json.loads(self._store.get(about))
        except Exception as error:
            if time.monotonic() < until:
                raise self._lost() from error
            raise DistributorError(
                f"After {WAIT_SECONDS:g} s, a report of rank {self.rank} still waits for rank "
                f"{of}. Every rank has to call report as often as the others."
            ) from error

    def _lost(self) -> ConnectionError:
        return ConnectionError(f"Rank {self.rank} has lost rank 0, through which ranks report.")

    def tell_mine(self, about: str, words: Any) -> None:
        """Tell what this rank has to say, as every rank does."""
        self.tell(f"{about}/{self.rank}", words)

    def hear_all(self, about: str) -> list[Any]:
        """Hear what every rank has said, in the order of ranks."""
        return [self.hear(f"{about}/{rank}", rank) for rank in range(self.size)]

    def claim(self, about: str, words: str) -> str:
        """Say what one rank alone may say; give what was said first."""
        try:
            first: bytes = self._store.compare_set(about, "", words)
        except Exception as error:
            raise self._lost() from error
        return first.decode()

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
