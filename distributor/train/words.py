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
        """Tell all, as rank 0 does what it has decided."""
        self._store.set(about, json.dumps(words))

    def hear(self, about: str, of: int = 0) -> Any:
        """Hear what was told to all.

        Raises
        ------
        DistributorError
            Where it does not come; names who is waited for.
        """
        began = time.monotonic()
        try:
            self._store.wait([about], timedelta(seconds=WAIT_SECONDS))
        except Exception as error:
            waited = time.monotonic() - began
            raise DistributorError(
                f"After {waited:.0f} s, a report of rank {self.rank} still waits for rank {of}. "
                "Every rank has to call report as often as the others."
            ) from error
        return json.loads(self._store.get(about))

    def tell_mine(self, about: str, words: Any) -> None:
        """Tell what this rank has to say, as every rank does."""
        self.tell(f"{about}/{self.rank}", words)

    def hear_all(self, about: str) -> list[Any]:
        """Hear what every rank has said, in the order of ranks."""
        return [self.hear(f"{about}/{rank}", rank) for rank in range(self.size)]
