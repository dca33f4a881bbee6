"""Connections of this rank to the store that rank 0 of the run serves."""

from __future__ import annotations

import threading
from typing import Any

from distributor.rank.context import worker_context


def connect_store(prefix: str, **options: Any) -> Any:
    """Return a store with its own connection, whatever rendezvous the program has chosen.

    Parameters
    ----------
    prefix : str
        The prefix of its keys.
    **options
        Of ``torch.distributed.TCPStore``.
    """
    import torch.distributed as dist

    with _connecting:
        client = dist.TCPStore(  # type: ignore[attr-defined]
            *worker_context().rendezvous, is_master=False, wait_for_workers=False, **options
        )
        store = dist.PrefixStore(prefix, client)  # type: ignore[attr-defined]
        del client
        return store


_connecting = threading.Lock()
"""Torch adds a new store to its table of Python objects without the interpreter's lock."""
