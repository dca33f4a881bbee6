"""Barriers and broadcasts through the rendezvous store, without torch's process group."""

from __future__ import annotations

import base64
import contextlib
import pickle
import threading
from collections.abc import Iterator
from typing import Any

from distributor.core.resources import format_bytes
from distributor.errors import OtherRankFailed
from distributor.serialization import oob_pickle
from distributor.train.runtime.store_channel import StoreChannel

LIMIT = 64 * 1000**2
"""Bytes that an object may have: each rank reads it from rank 0's store."""


class Collectives:
    """The collectives of this rank, one at a time, over a connection of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # That of reports may be busy with an upload for hours.
        self._channel: StoreChannel | None = None
        self._number = 0

    def barrier(self) -> None:
        with self._next() as (channel, key):
            channel.barrier(key)

    def broadcast(self, data: Any) -> Any:
        """Return the object of rank 0, once every rank has called this."""
        failed: Exception | None = None
        with self._next() as (channel, key):
            if channel.rank == 0:
                try:
                    offer = _packed(data)
                except Exception as error:
                    failed, offer = error, {"failed": f"{type(error).__name__}: {error}"}
                channel.set(f"{key}/data", offer)
            channel.barrier(key)
            found = channel.get(f"{key}/data")
        if failed is not None:
            raise failed
        if "failed" in found:
            raise OtherRankFailed(f"Rank 0 could not broadcast its object: {found['failed']}")
        if "too_large" in found:
            raise ValueError(found["too_large"])
        return pickle.loads(base64.b64decode(found["pickled"]))

    @contextlib.contextmanager
    def _next(self) -> Iterator[tuple[StoreChannel, str]]:
        """Provide the channel and the key of the next collective."""
        with self._lock:
            self._channel = channel = self._channel or StoreChannel.connect()
            key, self._number = f"collective/{self._number}", self._number + 1
            yield channel, key
            channel.delete_keys()


def _packed(data: Any) -> dict[str, str]:
    pickled = oob_pickle.dumps(data)
    if len(pickled) > LIMIT:
        size, limit = format_bytes(len(pickled)), format_bytes(LIMIT)
        return {
            "too_large": f"Rank 0 broadcasts {size}, but at most {limit} are possible: write a "
            "file that all ranks can read, or use torch.distributed."
        }
    return {"pickled": base64.b64encode(pickled).decode()}
