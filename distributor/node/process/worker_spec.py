"""What an agent passes to a rank that it starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from distributor.serialization.outcome import Origin


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What a rank gets from its agent; file descriptors are numbered as in the rank.

    Parameters
    ----------
    origin : Origin
        Which rank this is.
    parent : int
        The process id of the rank's parent: the agent or a supervisor.
    control : int
        A stream socket to the agent.
    program : int
        A file with the pickled `Program`, shared by the node's ranks.
    outcome : int
        An empty file for the value or failure.
    stacks : int
        A file for the rank's Python stacks.
    progress : int
        A file for the rank's telemetry.
    listener : int or None
        The bound socket for the rendezvous store; only rank 0 has it.
    data : int or None
        A file with the node's part of the run's datasets; None if it has none.
    scratch : str
        The folder for multiprocessing's sockets; the process that ends the rank removes it.
    keep_value : bool
        Whether the value that the rank returns is wanted.
    uses_gpus : bool
        Whether the run's ranks use GPUs. If not, the rank may still see some.
    modules : str
        Folders with the user's modules, separated as in PYTHONPATH; empty if there are none.
    has_preloads : bool
        Whether the rank was forked from a process that has imported modules for this run.
    program_name, run_id : str
        What the rank runs, and in which run, for process titles.
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
    uses_gpus: bool = True
    data: int | None = None
    modules: str = ""
    has_preloads: bool = False
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
        return [getattr(self, name) for name in self._descriptor_names()]

    def with_descriptors(self, descriptors: Sequence[int], parent: int) -> WorkerSpec:
        """Return the same spec with other numbers for its descriptors, and another parent."""
        numbers: dict[str, Any] = dict(zip(self._descriptor_names(), descriptors, strict=True))
        return replace(self, parent=parent, **numbers)

    def _descriptor_names(self) -> list[str]:
        names = ("control", "program", "outcome", "stacks", "progress", "listener", "data")
        return [name for name in names if getattr(self, name) is not None]
