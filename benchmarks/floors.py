"""Lower bounds: what the machine itself takes, without a launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.programs import call

CALL = str(Path(call.__file__).resolve())


def free_port() -> int:
    """Return a port that is free at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def rendezvous_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment variables with which a rank finds the others."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@contextmanager
def processes(place: str, ranks: int) -> Iterator[Callable[..., Any]]:
    """Start plain interpreters, which import torch and rendezvous."""
    with tempfile.TemporaryDirectory() as folder:

        def run(function: Callable[..., Any]) -> None:
            command = [sys.executable, CALL, target(function), folder]
            port = free_port()
            children = [
                subprocess.Popen(
                    command, env={**os.environ, **rendezvous_variables(rank, ranks, port)}
                )
                for rank in range(ranks)
            ]
            codes = [child.wait() for child in children]
            if any(codes):
                raise RuntimeError("a bare process failed")

        yield run


@contextmanager
def forks(place: str, ranks: int) -> Iterator[Callable[..., Any]]:
    """Fork this process, which has imported torch."""
    import torch.distributed  # noqa: F401

    def run(function: Callable[..., Any]) -> None:
        port = free_port()
        children = [
            _fork(function, rendezvous_variables(rank, ranks, port)) for rank in range(ranks)
        ]
        codes = [os.waitpid(child, 0)[1] for child in children]
        if any(codes):
            raise RuntimeError("a forked process failed")

    yield run


@contextmanager
def copies(place: str, ranks: int) -> Iterator[Callable[..., Any]]:
    """Call the function in this process, and copy its arguments and its value once."""

    def run(function: Callable[..., Any], *args: Any) -> Any:
        return _copy(function(*map(_copy, args)))

    yield run


def _copy(thing: Any) -> Any:
    if not isinstance(thing, dict):
        return thing
    return {name: tensor.clone() for name, tensor in thing.items()}


def _fork(function: Callable[..., Any], environment: dict[str, str]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.environ.update(environment)
        function()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def target(function: Callable[..., Any]) -> str:
    """Return the name of a function for ``programs/call.py``."""
    return f"{function.__module__}:{function.__qualname__}"


@contextmanager
def nowhere(place: str, ranks: int) -> Iterator[Callable[..., Any]]:
    """Stand for a lower bound that runs no function."""
    raise NotImplementedError
    yield
