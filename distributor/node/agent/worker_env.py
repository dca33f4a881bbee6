"""The environment of a rank: torchrun's variables, its GPUs, its network interface."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

from distributor.core.addresses import host_name
from distributor.core.rank_variables import THREADS_VARIABLE
from distributor.core.text import counted
from distributor.node.agent.network import interface_of
from distributor.node.process.specs import NodeShare

ROLE = "default"
PATH = "PYTHONPATH"

_IDENTITY: dict[str, Callable[[NodeShare, int], object]] = {
    "RANK": lambda node, local_rank: node.origin(local_rank).rank,
    "LOCAL_RANK": lambda node, local_rank: local_rank,
    "WORLD_SIZE": lambda node, local_rank: node.world_size,
    "LOCAL_WORLD_SIZE": lambda node, local_rank: node.ranks_per_node,
    "GROUP_RANK": lambda node, local_rank: node.node_rank,
    "GROUP_WORLD_SIZE": lambda node, local_rank: node.num_nodes,
    "NODE_RANK": lambda node, local_rank: node.node_rank,  # not torchrun's: PySpark's class sets it
    "ROLE_RANK": lambda node, local_rank: node.origin(local_rank).rank,
    "ROLE_NAME": lambda node, local_rank: ROLE,
    "ROLE_WORLD_SIZE": lambda node, local_rank: node.world_size,
    "MASTER_ADDR": lambda node, local_rank: node.master_addr,
    "MASTER_PORT": lambda node, local_rank: node.master_port,
    "TORCHELASTIC_RUN_ID": lambda node, local_rank: node.run_id,
    "TORCHELASTIC_RESTART_COUNT": lambda node, local_rank: node.attempt,
    "TORCHELASTIC_MAX_RESTARTS": lambda node, local_rank: 0,
    "TORCHELASTIC_USE_AGENT_STORE": lambda node, local_rank: True,
}

RANK_VARIABLES = frozenset(_IDENTITY)
"""The variables that identify a rank; a user's ``env`` cannot set them."""


def rank_environment(
    node: NodeShare, local_rank: int, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return all environment variables of a rank, as torchrun would set them.

    Neither the user's variables nor the agent's environment are overridden by defaults.
    """
    identity = {name: str(value(node, local_rank)) for name, value in _IDENTITY.items()}
    devices = {} if node.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(node.gpus)}
    interface = interface_of(node.address)
    # Without a GPU and ACCELERATE_USE_CPU, an Accelerator does not notice the other ranks: each
    # would train a model of its own. So would the Trainer of Transformers, which has one. If ranks
    # that are to train on CPUs see GPUs, both would use those.
    uses_cpus = not node.uses_gpus and node.world_size > 1
    environment = {
        **({f"{name}_SOCKET_IFNAME": interface for name in ("GLOO", "NCCL")} if interface else {}),
        **_process_defaults(node.ranks_per_node),
        **({"ACCELERATE_USE_CPU": "true"} if uses_cpus else {}),
        **inherited,
        **devices,
        **node.env,
        **identity,
    }
    # For processes that ranks start. The ranks themselves have the folders from their spec.
    paths = [path for path in (node.modules, environment.get(PATH, "")) if path]
    return environment | ({PATH: os.pathsep.join(paths)} if node.modules else {})


def common_environment(
    ranks_per_node: int, env: Mapping[str, str], inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables that the ranks of a node share in all runs."""
    return {**_process_defaults(ranks_per_node), **inherited, **env}


def _process_defaults(ranks_per_node: int) -> dict[str, str]:
    threads = {THREADS_VARIABLE: "1"} if ranks_per_node > 1 else {}
    return {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **threads}


def visible_devices(addresses: Sequence[str], mask: str | None) -> tuple[str, ...]:
    """Translate Spark's GPU addresses into entries for ``CUDA_VISIBLE_DEVICES``.

    Spark's addresses are positions, so they index into an inherited ``CUDA_VISIBLE_DEVICES``, if
    there is one. A discovery script that ignores this variable lists its entries, which are
    returned unchanged.
    """
    for address in addresses:
        if not address.isdecimal() or str(int(address)) != address:
            raise ValueError(
                f"Found GPU addresses {list(addresses)} which are not all in the correct format "
                "for CUDA_VISIBLE_DEVICES, which requires integers with no zero padding. "
                "Correct the GPU discovery script (conf/get_gpus.sh is an example that works)."
            )
    if mask is None:
        return tuple(addresses)
    entries = mask_entries(mask)
    if all(int(address) < len(entries) for address in addresses):
        return tuple(entries[int(address)] for address in addresses)
    if set(addresses) <= set(entries):
        return tuple(addresses)
    raise ValueError(
        f"Spark assigned the GPU addresses {list(addresses)}, but CUDA_VISIBLE_DEVICES={mask!r} "
        f"on {host_name()} has only {counted(len(entries), 'entry', 'entries')}. Have the "
        "discovery script list positions within CUDA_VISIBLE_DEVICES, or unset that variable for "
        "the executors."
    )


def mask_entries(mask: str) -> tuple[str, ...]:
    """Return the entries of ``CUDA_VISIBLE_DEVICES`` that CUDA uses: those before the first -1."""
    entries = (entry.strip() for entry in mask.split(",") if entry.strip())
    return tuple(takewhile(lambda entry: entry[0] != "-" and entry != "NoDevFiles", entries))


def node_order(hosts: Sequence[str]) -> list[int]:
    """Order the nodes so that the nodes of one host are adjacent."""
    first_seen = {host: partition for partition, host in reversed(list(enumerate(hosts)))}
    return sorted(
        range(len(hosts)), key=lambda partition: (first_seen[hosts[partition]], partition)
    )
