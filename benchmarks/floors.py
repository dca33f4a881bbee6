"""Lower bounds: what the machine itself takes, without a launcher."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
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


@contextmanager
def sockets(place: str, ranks: int) -> Iterator[Callable[..., Any]]:
    """Call the function in processes that receive its arguments over plain sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as until_end:
        address = listener.getsockname()
        children = [_fork(lambda: _serve_calls(address), {}) for _ in range(ranks)]
        streams = [until_end.enter_context(listener.accept()[0]) for _ in children]

        def run(function: Callable[..., Any], *args: Any) -> Any:
            with ThreadPoolExecutor(ranks) as pool:
                return next(iter(pool.map(lambda each: _call(each, function, args), streams)))

        yield run
    for child in children:
        os.waitpid(child, 0)


def _call(stream: socket.socket, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Send a call and receive its value."""
    buffers: list[pickle.PickleBuffer] = []
    content = function, _to(args, "numpy")
    call = pickle.dumps(content, protocol=5, buffer_callback=buffers.append)
    memory = [memoryview(call), *(buffer.raw() for buffer in buffers)]
    sizes = pickle.dumps([each.nbytes for each in memory])
    stream.sendall(struct.pack("<I", len(sizes)) + sizes)
    for each in memory:
        stream.sendall(each)
    return pickle.loads(_received(stream, struct.unpack("<I", _received(stream, 4))[0]))


def _serve_calls(address: tuple[str, int]) -> None:
    """Receive calls and send their values until the other side closes."""
    with socket.create_connection(address) as stream:
        while head := _received(stream, 4):
            sizes = pickle.loads(_received(stream, struct.unpack("<I", head)[0]))
            call, *buffers = [_received(stream, size) for size in sizes]
            function, args = pickle.loads(call, buffers=buffers)
            value = pickle.dumps(function(*_to(args, "torch")))
            stream.sendall(struct.pack("<I", len(value)) + value)


def _to(args: tuple[Any, ...], library: str) -> tuple[Any, ...]:
    """Return the arguments with dictionaries of tensors as arrays, or the other way round."""
    import torch

    convert = torch.Tensor.numpy if library == "numpy" else torch.from_numpy
    return tuple(
        {name: convert(each) for name, each in arg.items()} if isinstance(arg, dict) else arg
        for arg in args
    )


def _received(stream: socket.socket, size: int) -> bytearray:
    """Receive so many bytes; none if the other side has closed."""
    memory, filled = bytearray(size), 0
    while filled < size:
        count = stream.recv_into(memoryview(memory)[filled:])
        if not count:
            return bytearray()
        filled += count
    return memory


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
