"""What an agent tells a rank that it starts, and the command that starts it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

from distributor.wire.outcome import Origin


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
from distributor.node import order, worker
worker.main(order.Order.from_argument(sys.argv.pop()), at_the_end)
"""
"""What the interpreter of a rank runs; its arguments are an `Order` and a ``sys.path``.

Exit handlers run last in, first out: registered before any import, ours comes after all others.
"""


def command(order: Order) -> list[str]:
    """Give the command line that starts the rank with this process's modules at hand."""
    return [sys.executable, "-c", BOOT, order.to_argument(), json.dumps(sys.path)]
