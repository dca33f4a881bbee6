"""One node's share of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distributor.serialization.outcome import Origin


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """One node's share of a run: its ranks, and the address of the rendezvous store.

    Parameters
    ----------
    run_id : str
        The run's id; ``TORCHELASTIC_RUN_ID`` of its ranks.
    attempt : int
        Number of the attempt, counted from 0.
    host : str
        This machine's name or address, for messages.
    address : str
        This machine's address among the nodes, which determines the network interface.
    node_rank, num_nodes : int
        This node's number among the run's nodes, and how many there are.
    ranks_per_node : int
        Number of ranks on this and every other node.
    master_addr, master_port : str, int
        The address of rank 0's store.
    gpus : tuple of str, optional
        GPUs of this node's ranks, as entries of ``CUDA_VISIBLE_DEVICES``. An empty tuple hides
        all GPUs, and None leaves the variable unchanged. Both are for ranks that use no GPUs.
    env : mapping of str to str
        The user's environment variables, which override those of the agent's environment.
    modules : str
        Folders with the user's modules, which are searched first, in the format of PYTHONPATH;
        empty if there are none.
    program_name : str
        The function's or script's name, for process titles.
    secret : bytes
        Authenticates what the ranks of this attempt exchange through the store.
    """

    run_id: str
    attempt: int = 0
    host: str
    address: str
    node_rank: int = 0
    num_nodes: int = 1
    ranks_per_node: int
    master_addr: str
    master_port: int
    gpus: tuple[str, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    modules: str = ""
    program_name: str = ""
    secret: bytes = field(repr=False)

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
