"""One rank: load the program, run it, record the outcome, leave."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import mmap
import os
import pickle
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

from distributor.node.program import Call, Program, Script
from distributor.wire import pickling
from distributor.wire.outcome import Origin, failure_of

STARTED, VALUE, FAILURE, RELEASE = b"S", b"V", b"F", b"R"
"""What passes over the leash: that work begins, how it ended, and that the rank may leave."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What an agent tells a rank that it starts; file descriptors are the rank's own.

    Parameters
    ----------
    origin : Origin
        Who this rank is.
    parent : int
        The agent's process id.
    leash : int
        A stream socket to the agent.
    program : int
        A file with the pickled `Program`, shared by the node's ranks.
    outcome : int
        An empty file for the value or failure.
    listener : int or None
        The bound socket for the rendezvous store; only rank 0 has it.
    keep_value : bool
        Whether anyone wants what this rank returns.
    """

    origin: Origin
    parent: int
    leash: int
    program: int
    outcome: int
    listener: int | None
    keep_value: bool

    def to_argument(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_argument(cls, argument: str) -> Order:
        fields = json.loads(argument)
        return cls(**{**fields, "origin": Origin(**fields["origin"])})

    def descriptors(self) -> list[int]:
        """List the descriptors that the rank inherits."""
        given = (self.leash, self.program, self.outcome, self.listener)
        return [descriptor for descriptor in given if descriptor is not None]


BOOT = """
import atexit, json, sys
at_the_end = []
atexit.register(lambda: [leave() for leave in at_the_end])
sys.path[:] = json.loads(sys.argv.pop())
from distributor.node import worker
worker.main(worker.Order.from_argument(sys.argv.pop()), at_the_end)
"""
"""What the interpreter of a rank runs; its arguments are an `Order` and a ``sys.path``.

Exit handlers run last in, first out: registered before any import, ours comes after all others.
"""


def command(order: Order) -> list[str]:
    """Give the command line that starts the rank with this process's modules at hand."""
    return [sys.executable, "-c", BOOT, order.to_argument(), json.dumps(sys.path)]


def main(order: Order, at_the_end: list[Callable[[], object]]) -> None:
    """Be the rank that `order` describes, and end the process."""
    exit_code = [1]
    at_the_end.append(lambda: _leave(exit_code))
    leash = Leash(order)
    _prepare_streams()
    store = _serve_store(order)
    leash.tell(STARTED)
    try:
        succeeded = _run_and_record(order)
    except SystemExit as leaving:
        # A death like any other: the agent tells it from the exit code, with the last output.
        exit_code[0] = _exit_code_of(leaving)
        return
    exit_code[0] = 0 if succeeded else 1
    leash.tell(VALUE if succeeded else FAILURE)
    leash.await_release()
    del store  # until here it serves the other ranks


class Leash:
    """The tie to the agent: no rank outlives its agent, or leaves before it may."""

    def __init__(self, order: Order) -> None:
        for descriptor in order.descriptors():
            os.set_inheritable(descriptor, False)
        _die_with_parent(order.parent)
        self._socket = socket.socket(fileno=order.leash)
        self._released = threading.Event()
        threading.Thread(target=self._watch, name="leash", daemon=True).start()

    def tell(self, what: bytes) -> None:
        """Tell the agent how far this rank has come."""
        self._socket.sendall(what)

    def await_release(self) -> None:
        """Wait until this rank may leave."""
        self._released.wait()

    def _watch(self) -> None:
        with contextlib.suppress(OSError):
            if self._socket.recv(1) == RELEASE:
                self._released.set()
                self._socket.recv(1)  # returns when the agent has closed its end, or is gone
                return
        os.killpg(os.getpgid(0), signal.SIGKILL)


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(1)


def _prepare_streams() -> None:
    """Show each line when it is printed, and never fail on a character; trace crashes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    faulthandler.enable()


def _serve_store(order: Order) -> object:
    """Open the rendezvous store on the inherited socket, so that no port is ever guessed."""
    if order.listener is None:
        return None
    try:
        import torch.distributed as dist
    except ImportError:
        return None  # nobody in this run can ask for it
    return dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=True,
        master_listen_fd=order.listener,
        wait_for_workers=False,
    )


def _run_and_record(order: Order) -> bool:
    """Run the program, and record its value or its failure; tell whether it succeeded."""
    with open(order.outcome, "wb") as file:
        try:
            value = _execute(_load_program(order.program))
            if order.keep_value:
                pickling.dump_value(value, file, what=f"rank {order.origin.rank}")
            return True
        except SystemExit:
            raise
        except BaseException as error:  # whatever it is, the driver wants to know
            failure = failure_of(error, order.origin)
            print(failure.text, file=sys.stderr, end="")
            file.seek(0)
            file.truncate()
            pickle.dump(failure, file)
            return False


def _exit_code_of(leaving: SystemExit) -> int:
    """Read what ``sys.exit`` was given, as the interpreter does."""
    if leaving.code is None or isinstance(leaving.code, int):
        return (leaving.code or 0) & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1


def _load_program(descriptor: int) -> Program:
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as mapped:
        program = pickle.load(mapped)
    assert isinstance(program, (Call, Script))
    return program


def _execute(program: Program) -> Any:
    """Run the program; leaving with code 0 is its way to return None."""
    try:
        return _call(program)
    except SystemExit as leaving:
        if leaving.code in (None, 0):
            return None
        raise


def _call(program: Program) -> Any:
    if isinstance(program, Script):
        sys.argv = [program.path, *program.args]
        sys.path.insert(0, str(Path(program.path).parent))
        runpy.run_path(program.path, run_name="__main__")
        return None
    sys.argv = [program.name]
    pickling.install_sources(program.call.sources)
    function, args, kwargs = pickle.loads(program.call.payload)
    _fill_main(function)
    return function(*args, **kwargs)


def _fill_main(function: Any) -> None:
    """Put what travelled from the driver's ``__main__`` into this one.

    Whoever pickles by name here, as ``torch.save`` does, then finds a notebook's classes.
    """
    ours = vars(sys.modules["__main__"])
    travelled = getattr(getattr(function, "func", function), "__globals__", {})
    for name, value in list(travelled.items()):
        if getattr(value, "__module__", None) == "__main__":
            ours.setdefault(name, value)


def _leave(exit_code: list[int]) -> NoReturn:
    """End without the interpreter's teardown, which costs time and can abort in C++ code."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what C code printed
    os._exit(exit_code[0])
