"""What an agent passes to a rank that it starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from distributor.serialization.outcome import Origin


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What an agent tells a rank that it starts; file descriptors are the rank's own.

    Parameters
    ----------
    origin : Origin
        Who this rank is.
    parent : int
        The agent's process id.
    control : int
        A stream socket to the agent.
    program : int
        A file with the pickled `Program`, shared by the node's ranks.
    outcome : int
        An empty file for the value or failure.
    stacks : int
        A file in which to answer where it stands.
    progress : int
        A file in which to tell how far it is.
    listener : int or None
        The bound socket for the rendezvous store; only rank 0 has it.
    scratch : str
        The folder for multiprocessing's sockets; whoever ends the rank removes it.
    keep_value : bool
        Whether anyone wants what this rank returns.
    modules : str
        Folders with the user's modules, as PYTHONPATH has them; empty if there are none.
    program_name, run_id : str
        What the rank runs, and in which run, for titles of processes.
    """

    origin: Origin
    parent: int
    control: int
    program: int
    outcome: int
    stacks: int
    progress: int
    listener: int | None
    scratch: str
    keep_value: bool
    modules: str = ""
    program_name: str = ""
    run_id: str = ""

    def to_argument(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_argument(cls, argument: str) -> WorkerSpec:
        fields = json.loads(argument)
        return cls(**{**fields, "origin": Origin(**fields["origin"])})

    def descriptors(self) -> list[int]:
        """List the descriptors that the rank inherits."""
        return [getattr(self, name) for name in self._given()]

    def with_descriptors(self, descriptors: Sequence[int], parent: int) -> WorkerSpec:
        """Return the same spec with other numbers for its descriptors, and another parent."""
        numbers: dict[str, Any] = dict(zip(self._given(), descriptors, strict=True))
        return replace(self, parent=parent, **numbers)

    def _given(self) -> list[str]:
        names = ("control", "program", "outcome", "stacks", "progress", "listener")
        return [name for name in names if getattr(self, name) is not None]
