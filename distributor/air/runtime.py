"""Who a rank is, under the names of ``databricks.air.runtime``."""

from distributor.runtime import (
    get_global_rank,
    get_local_rank,
    get_local_world_size,
    get_node_ip,
    get_node_rank,
    get_replica_rank,
    get_world_size,
)

__all__ = [
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_node_ip",
    "get_node_rank",
    "get_replica_rank",
    "get_world_size",
]
