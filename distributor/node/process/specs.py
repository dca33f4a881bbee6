"""What a node, and each of its ranks, gets for a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal

from distributor.serialization.outcome import Origin


@dataclass(frozen=True, kw_only=True)
class NodeShare:
    """A node's share of a run. The driver fills in what all nodes have, and each node the rest.

    Parameters
    ----------
    run_id : str
        The run's id; ``TORCHELASTIC_RUN_ID`` of its ranks.
    attempt : int
        Number of the attempt, counted from 0.
    program_name : str
        The function's or script's name, for process titles.
    num_nodes, ranks_per_node : int
        How many nodes there are, and how many ranks on each.
    keep_all : bool
        Whether every rank's value is wanted, or rank 0's alone.
    env : mapping of str to str
        The user's environment variables, which override those of the agent's environment.
    secret : bytes
        Authenticates what the ranks of this attempt exchange through the store.
    settings : SimpleNamespace
        The settings that nodes and ranks get. The driver enforces `timeout`, or a node itself if it
        has no link to the driver.
    rank_ports : range or None
        The ports that rank 0's store may use; None for any.
    activity_interval : float or None
        Seconds between two measurements of whether the ranks are idle; None for no measurement.
    node_rank : int
        This node's number.
    host : str
        This machine's name or address, for messages.
    executor : str
        The process that the node is lost with, if that may have others too.
    address : str
        This machine's address among the nodes, which determines the network interface.
    master_addr, master_port : str, int
        The address of rank 0's store.
    gpus : tuple of str, optional
        GPUs of this node's ranks, as entries of ``CUDA_VISIBLE_DEVICES``. An empty tuple hides
        all GPUs, and None leaves the variable unchanged. Both are for ranks that use no GPUs.
    joins : bool
        Whether its ranks join those that train already.
    modules : str
        Folders with the user's modules, which are searched first, in the format of PYTHONPATH;
        empty if there are none.
    """

    run_id: str
    attempt: int = 0
    program_name: str = ""
    num_nodes: int = 1
    ranks_per_node: int
    keep_all: bool = False
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    secret: bytes = field(repr=False)
    settings: SimpleNamespace
    rank_ports: range | None = None
    activity_interval: float | None = None
    node_rank: int = 0
    host: str = ""
    executor: str = ""
    address: str = ""
    master_addr: str = ""
    master_port: int = 0
    gpus: tuple[str, ...] | None = None
    joins: bool = False
    modules: str = ""

    @property
    def goes_on(self) -> bool:
        """Whether the survivors of a lost rank go on."""
        return bool(self.settings.recovery == "in_place")

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def uses_gpus(self) -> bool:
        """Whether its ranks use GPUs; those that do not may still see some."""
        return bool(self.gpus)

    @property
    def name(self) -> str:
        """A name that is unique in the run, even if several nodes are on one host."""
        return f"node{self.node_rank}-{self.host}"

    def origin(self, local_rank: int) -> Origin:
        """Return the origin of the node's rank number `local_rank`."""
        return Origin(
            rank=self.node_rank * self.ranks_per_node + local_rank,
            local_rank=local_rank,
            host=self.host,
            attempt=self.attempt,
        )

    def without_secrets(self) -> NodeShare:
        """Return what may appear in a command line."""
        return replace(self, env={}, secret=b"")


Role = Literal["rank", "replacement", "store"]
"""A rank, one that joins in the place of a lost one, or a process that serves the store alone."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What a rank gets from its agent; file descriptors are numbered as in the rank."""

    share: NodeShare  # of its node, without secrets
    local_rank: int
    role: Role = "rank"
    former: int = 0  # the process id of the rank that it replaces, whose memory it may need
    parent: int  # the process id of the agent or a supervisor
    control: int  # a stream socket to the agent
    program: int  # a file with the pickled `Program`, shared by the node's ranks
    outcome: int  # an empty file for the value or failure
    stacks: int
    progress: int
    counters: int | None  # a file in memory for its `Counters`; None if nothing is counted
    listener: int | None  # the bound socket for the rendezvous store; only rank 0 has it
    data: int | None  # a file with the node's part of the run's datasets
    scratch: str  # the folder for multiprocessing's sockets; who ends the rank removes it
    has_preloads: bool = False  # forked from a process that has imported modules for this run

    @property
    def origin(self) -> Origin:
        return self.share.origin(self.local_rank)

    def descriptors(self) -> list[int]:
        """List the descriptors that the rank inherits."""
        return [getattr(self, name) for name in self._descriptor_names()]

    def with_descriptors(self, descriptors: Sequence[int], parent: int) -> WorkerSpec:
        """Return the same spec with other numbers for its descriptors, and another parent."""
        numbers: dict[str, Any] = dict(zip(self._descriptor_names(), descriptors, strict=True))
        return replace(self, parent=parent, **numbers)

    def _descriptor_names(self) -> list[str]:
        names = ["control", "program", "outcome", "stacks", "progress"]
        names += ["counters", "listener", "data"]
        return [name for name in names if getattr(self, name) is not None]
