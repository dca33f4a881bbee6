"""What YARN's resource manager reports about its nodes and the application's queue."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

from distributor._compat import pyspark as private
from distributor.launchers.spark.capacity.machines import Capacity, Machines
from distributor.spark.session import Session


@dataclass(frozen=True)
class YarnCluster:
    """What YARN reports.

    Parameters
    ----------
    nodes : Machines
        The nodes that run.
    queue : str
        The application's queue, and how much of it is in use, as a sentence.
    min_allocation : int
        The memory of which each container gets a multiple (MiB).
    executors : int
        The containers of executors that run as far as YARN knows.
    expiry : float
        Seconds until YARN notices that a node is lost.
    """

    nodes: Machines
    queue: str
    min_allocation: int
    executors: int
    expiry: float

    def container(self, asked: Capacity) -> Capacity:
        """Return what YARN allocates for an executor.

        Its scheduler looks at cores only if it is configured to, which a client cannot know.
        """
        memory = math.ceil(asked.memory / self.min_allocation) * self.min_allocation
        return Capacity(0, memory, asked.gpus)


def ask_yarn(session: Session) -> YarnCluster | None:
    """Ask the resource manager; return None if it does not answer."""
    context = session.spark.sparkContext
    with contextlib.suppress(Exception), private.Yarn(context) as yarn:
        found = [(Capacity(*total), Capacity(*used)) for total, used in yarn.nodes()]
        nodes = Machines(tuple(t for t, _ in found), tuple(t.less(u) for t, u in found))
        queue, containers = yarn.usage(context.applicationId)
        used, most = yarn.queue_shares(queue)
        share = f"Queue '{queue}' is at {used:.0%} of its capacity, and may take {most:.0%} of its"
        return YarnCluster(
            nodes,
            f"{share} parent's.",
            yarn.min_allocation(),
            executors=containers - 1,
            expiry=yarn.expiry_seconds(),
        )
    return None
