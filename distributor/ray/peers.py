"""What the Ray nodes of a run exchange through the run's rendezvous store."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

from distributor.errors import StartTimeout
from distributor.rank.context import connect_store


class Peers:
    """JSON values that the nodes share, by name.

    Parameters
    ----------
    deadline : float
        When, by ``time.monotonic``, all nodes must have started.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._store = connect_store("distributor/ray")

    def set(self, name: str, value: object) -> None:
        """Share a value with all nodes."""
        self._store.set(name, json.dumps(value))

    def has(self, name: str) -> bool:
        """Return whether a value is there."""
        return bool(self._store.check([name]))

    def get(self, name: str, what: str) -> Any:
        """Return a value, once it is there.

        Raises
        ------
        StartTimeout
            If it is not there at the deadline; the message has `what`.
        """
        import torch.distributed as dist

        seconds = max(0.001, self._deadline - time.monotonic())
        try:
            self._store.wait([name], timedelta(seconds=seconds))
        except dist.DistStoreError:
            raise StartTimeout(f"Not all Ray nodes started within start_timeout: {what}.") from None
        return json.loads(self._store.get(name))
