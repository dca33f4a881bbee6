"""Launcher: ranks on this machine, watched by an agent in the driver's own process."""

from __future__ import annotations

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
        RunTimeout
            Where the job's ``timeout`` passed.
        """
        seconds = job.settings.timeout
        deadline = None if seconds is None else time.monotonic() + seconds
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
                return agent.run(deadline)

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
