"""Programs that open a rendezvous of their own, as most PyTorch tutorials do.

A rank's environment names the store that rank 0 serves, and ``TORCHELASTIC_USE_AGENT_STORE`` makes
every rank a client of it. A program that sets ``MASTER_ADDR`` and ``MASTER_PORT`` itself would
therefore wait for a store that nobody serves. So would the processes of
``torch.multiprocessing.spawn``, if a rank's program starts them.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from distributor._compat import torch as private
from distributor.core.addresses import is_loopback, joined, resolve
from distributor.rank.import_hooks import adapt
from distributor.serialization import code_pickle

USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
RUN_ID = "TORCHELASTIC_RUN_ID"


def allow_own_rendezvous(host: str, port: int, run_id: str) -> None:
    """Have this process serve a store itself if its program chooses another port."""
    choose = partial(_choose_store, host, port, run_id)
    adapt("torch.distributed.rendezvous", partial(private.choose_store, choose=choose))
    adapt("torch.distributed.distributed_c10d", private.separate_initializations)
    wrap = partial(_SpawnedFunction, host, port, run_id)
    adapt("torch.multiprocessing.spawn", partial(private.wrap_spawned, wrap=wrap))


def _choose_store(host: str, port: int, run_id: str, wanted_host: str, wanted_port: int) -> str:
    """Decide who serves the store that the program wants; return the host to connect to."""
    if os.environ.get(RUN_ID, run_id) != run_id:
        # A rank has started another agent, which serves the store of its own ranks.
        return wanted_host
    is_ours = wanted_port == port
    os.environ[USE_AGENT_STORE] = str(is_ours)
    if wanted_host == host or not _resolves_to_loopback(wanted_host):
        return wanted_host
    if not _is_of_this_machine(host):
        raise ValueError(
            f"The program's rendezvous address is {joined(wanted_host, wanted_port)}, but rank 0 "
            f"is on another machine ({host}). Do not set MASTER_ADDR, MASTER_PORT or init_method "
            "in the program: each rank's environment already has the right values."
        )
    return host if is_ours else wanted_host


def _resolves_to_loopback(host: str) -> bool:
    try:
        return is_loopback(resolve(host)[1])
    except OSError:
        return False  # torch's own error names it


def _is_of_this_machine(host: str) -> bool:
    try:
        family, address = resolve(host)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


class _SpawnedFunction:
    """A function that ``torch.multiprocessing`` calls in processes that it starts.

    It is pickled by value if it cannot be pickled by name, as a nested function.
    """

    def __init__(self, host: str, port: int, run_id: str, function: Callable[..., object]) -> None:
        self.run, self.function = (host, port, run_id), function

    def __call__(self, *args: Any) -> None:
        allow_own_rendezvous(*self.run)
        self.function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            pickle.dumps(self.function)
        except Exception:
            return _load_spawned, (*self.run, code_pickle.dumps(self.function))
        return _SpawnedFunction, (*self.run, self.function)


def _load_spawned(host: str, port: int, run_id: str, pickled: bytes) -> _SpawnedFunction:
    return _SpawnedFunction(host, port, run_id, pickle.loads(pickled))
