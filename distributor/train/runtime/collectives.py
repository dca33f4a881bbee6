"""Barriers and broadcasts through the rendezvous store, without torch's process group."""

from __future__ import annotations

import base64
import contextlib
import hmac
import pickle
import threading
from collections.abc import Iterator
from typing import Any

from distributor.core.addresses import joined
from distributor.core.resources import format_bytes
from distributor.errors import DistributorError
from distributor.rank.context import worker_context
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
        with self._next() as (channel, key):
            if channel.rank == 0:
                channel.set(f"{key}/data", _packed(data, key))
            channel.barrier(key)
            found = channel.get(f"{key}/data")
        if "too_large" in found:
            raise ValueError(found["too_large"])
        return _unpacked(found, key)

    @contextlib.contextmanager
    def _next(self) -> Iterator[tuple[StoreChannel, str]]:
        """Provide the channel and the key of the next collective."""
        with self._lock:
            self._channel = channel = self._channel or StoreChannel.connect()
            key, self._number = f"collective/{self._number}", self._number + 1
            yield channel, key
            channel.delete_keys()


def _packed(data: Any, key: str) -> dict[str, str]:
    pickled = oob_pickle.dumps(data)
    if len(pickled) > LIMIT:
        size, limit = format_bytes(len(pickled)), format_bytes(LIMIT)
        return {
            "too_large": f"Rank 0 broadcasts {size}, but at most {limit} are possible: write a "
            "file that all ranks can read, or use torch.distributed."
        }
    return {"pickled": base64.b64encode(pickled).decode(), "tag": _tag(pickled, key)}


def _unpacked(found: dict[str, str], key: str) -> Any:
    """Unpickle what rank 0 has set for a key, and nothing else: anybody can write to the store."""
    pickled = base64.b64decode(found["pickled"])
    if not hmac.compare_digest(str(found.get("tag")).encode(), _tag(pickled, key).encode()):
        raise DistributorError(
            "What was broadcast is not what rank 0 has sent: another program writes to the "
            f"rendezvous store at {joined(*worker_context().rendezvous)}. Use a network that only "
            "the cluster can reach."
        )
    return pickle.loads(pickled)


def _tag(pickled: bytes, key: str) -> str:
    mac = hmac.new(worker_context().secret, key.encode() + b"\n", "sha256")
    mac.update(pickled)
    return mac.hexdigest()
