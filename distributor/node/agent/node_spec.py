"""One node's share of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distributor.serialization.outcome import Origin


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """One node's share of a run: which ranks it holds, and where they meet the others.

    Parameters
    ----------
    run_id : str
        The run's name; ``TORCHELASTIC_RUN_ID`` of its ranks.
    attempt : int
        0 for the first launch of the run.
    host : str
        This machine's name or address, for messages.
    address : str
        This machine's address among the nodes; decides the network interface.
    node_rank, num_nodes : int
        This node's place among the run's nodes.
    ranks_per_node : int
        Ranks on this and on every node.
    master_addr, master_port : str, int
        Where rank 0's store listens.
    gpus : tuple of str, optional
        GPUs of this node's ranks, as ``CUDA_VISIBLE_DEVICES`` wants them; empty hides all of
        them and None leaves the variable as it is.
    env : mapping of str to str
        The user's own variables; they win over the environment that is here already.
    modules : str
        Folders with the user's modules, to be searched first, as PYTHONPATH has them; empty if
        there are none.
    program_name : str
        The function's or script's name, for titles of processes.
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

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def name(self) -> str:
        """What the node is called among the run's; two may be on one host."""
        return f"node{self.node_rank}-{self.host}"

    def origin(self, local_rank: int) -> Origin:
        """Say who the node's rank number `local_rank` is."""
        return Origin(
            rank=self.node_rank * self.ranks_per_node + local_rank,
            local_rank=local_rank,
            host=self.host,
            attempt=self.attempt,
        )
