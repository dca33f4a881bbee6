"""Barriers and broadcasts through the rendezvous store, without torch's process group."""

from __future__ import annotations

import base64
import pickle
import threading
from typing import Any

from distributor.core.resources import format_bytes
from distributor.serialization import oob_pickle
from distributor.train.runtime.store_channel import StoreChannel

LIMIT = 64 * 1000**2
"""Bytes that an object may have: each rank reads it from rank 0's store."""


class Collectives:
    """The collectives of this rank, one at a time, over a connection of their own.

    Reports have another one, which may be busy with an upload for hours.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: StoreChannel | None = None
        self._number = 0

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.broadcast(None)

    def broadcast(self, data: Any) -> Any:
        """Return the object of rank 0, once every rank has called this."""
        with self._lock:
            self._channel = channel = self._channel or StoreChannel.connect()
            key, self._number = f"collective/{self._number}", self._number + 1
            if channel.rank == 0:
                channel.set(f"{key}/data", _packed(data))
            channel.barrier(key)
            found = channel.get(f"{key}/data")
            channel.delete_keys()
        if "too_large" in found:
            raise ValueError(found["too_large"])
        return pickle.loads(base64.b64decode(found["pickled"]))


def _packed(data: Any) -> dict[str, str]:
    pickled = oob_pickle.dumps(data)
    if len(pickled) > LIMIT:
        size, limit = format_bytes(len(pickled)), format_bytes(LIMIT)
        return {
            "too_large": f"Rank 0 broadcasts {size}, but at most {limit} are possible: write a "
            "file that all ranks can read, or use torch.distributed."
        }
    return {"pickled": base64.b64encode(pickled).decode()}
