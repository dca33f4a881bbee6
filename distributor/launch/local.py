"""Launcher: ranks on this machine, watched by an agent in the driver's own process."""

from __future__ import annotations

import math
import socket
import time
from dataclasses import dataclass

from distributor.launch.console import notify
from distributor.launch.job import Job
from distributor.node.agent import Agent, Sink
from distributor.node.environment import Node
from distributor.wire.outcome import Outcome

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class LocalLauncher:
    """Runs every rank of a job on this machine.

    Parameters
    ----------
    gpus : tuple of str
        Entries for ``CUDA_VISIBLE_DEVICES``, one for each rank; empty where ranks use none.
    """

    gpus: tuple[str, ...]

    def launch(self, job: Job, sink: Sink) -> list[Outcome]:
        """Run all ranks; give the outcomes of those that ended by themselves.

        Raises
        ------
        StartTimeout, RunTimeout
            Where a deadline of the job passed.
        """
        settings, now = job.settings, time.monotonic()
        start_deadline = now + settings.start_timeout
        deadline = now + (settings.timeout or math.inf)
        with socket.create_server((LOOPBACK, 0)) as listener:
            agent = Agent(
                self._node(job, listener),
                job.program,
                sink,
                listener=listener,
                keep_all=job.keep_all,
                on_done=lambda: agent.release(),
            )
            notify(f"Started local training with {job.num_processes} processes")
            with agent:
                return agent.run(start_deadline, deadline)

    def _node(self, job: Job, listener: socket.socket) -> Node:
        return Node(
            run_id=job.run_id,
            attempt=job.attempt,
            host=socket.gethostname(),
            address=LOOPBACK,
            ranks_per_node=job.num_processes,
            master_addr=LOOPBACK,
            master_port=listener.getsockname()[1],
            gpus=self.gpus,
            env=job.settings.env,
        )
