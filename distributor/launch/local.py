"""Launcher: ranks on this machine, watched by an agent in the driver's own process."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from distributor.core.addresses import port_range
from distributor.launch.console import notify
from distributor.launch.job import LOCAL_TRAINING, Job, Settings
from distributor.launch.one_time_warnings import warn_about_nodes, warn_if_source_changed
from distributor.launch.spark.environments import prepared_here
from distributor.launch.spark.user_modules import folders_of
from distributor.node.agent.agent import Agent
from distributor.node.agent.memory import memory_warnings
from distributor.node.agent.network import listen_for_ranks
from distributor.node.agent.node_spec import NodeSpec
from distributor.node.agent.node_warnings import node_warnings
from distributor.node.agent.sink import Sink
from distributor.node.agent.worker_env import common_environment
from distributor.node.process import zygote_client
from distributor.node.process.interpreter import Interpreter
from distributor.node.process.supervisor_client import is_supported
from distributor.node.process.zygote_client import ZygoteSpec
from distributor.serialization.outcome import Outcome
from distributor.serialization.program import in_file
from distributor.wire.messages import NodeWarning

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

    @property
    def shares_disk(self) -> bool:
        """Whether the ranks certainly reach files that are on this machine: always."""
        return True

    @property
    def training(self) -> str:
        """How messages name a run here; has a place for the number of ranks."""
        return LOCAL_TRAINING

    def prepare(self, settings: Settings, num_processes: int) -> None:
        """Begin what the first run would otherwise have to wait for."""
        if settings.environment:
            return  # it may take long to make, and perhaps no run follows
        env = {**settings.forwarded, **settings.env}
        zygote_client.prepare(_zygote_spec(settings, num_processes, env, Interpreter.current()))

    def resolve_size(self, job: Job) -> tuple[LocalLauncher, int]:
        """Give this launcher: what there is room for here was found out when it was planned."""
        return self, job.num_processes

    def launch(self, job: Job, sink: Sink) -> list[Outcome]:
        """Run all ranks; give the outcomes of those that ended by themselves.

        Raises
        ------
        StartTimeout, RunTimeout
            Where a deadline of the job passed.
        ExecutorNotReady
            If the environment cannot be had here, or none of ``rank_ports`` is free.
        """
        warn_if_source_changed()
        warn_about_nodes({socket.gethostname(): [*node_warnings(), *_memory_warnings(job)]})
        settings = job.settings
        start_deadline = time.monotonic() + settings.start_timeout
        with prepared_here(settings.environment, job.env, start_deadline) as prepared:
            interpreter = prepared.interpreter if prepared else Interpreter.current()
            return self._run(job, sink, interpreter, start_deadline)

    def _run(
        self, job: Job, sink: Sink, interpreter: Interpreter, start_deadline: float
    ) -> list[Outcome]:
        settings = job.settings
        env = {**interpreter.variables, **job.env}
        zygote_spec = _zygote_spec(settings, job.num_processes, env, interpreter)
        ports = port_range("rank_ports", settings.rank_ports)
        with (
            listen_for_ranks(LOOPBACK, ports) as listener,
            in_file(job.program) as program,
            zygote_client.open_spawner(zygote_spec, start_deadline, interpreter) as spawner,
        ):
            agent = Agent(
                self._node(job, listener, env),
                program,
                sink,
                spawner,
                listener=listener,
                keep_all=job.keep_all,
                on_started=lambda: self._note_start(job),
                on_failure=job.failures.append,
                on_stacks=job.inquiry.answer,
                on_done=lambda: agent.release(),
                on_subscribed=job.preemption.subscribe,
                on_sigterm=lambda: agent.give_notice(),
            )
            job.inquiry.ask = agent.ask_for_stacks
            job.cancellation.then(agent.stop)
            job.preemption.through(agent.give_notice)
            notify(job.heading)
            with agent:
                outcomes = agent.run(start_deadline, settings.timeout or math.inf)
                job.cancellation.check()
                return outcomes

    def describe(self) -> dict[str, object]:
        """Say where ranks are launched, for the record."""
        return {"mode": "local", "nodes": 1, "gpus": len(self.gpus)}

    def thread(self, target: Callable[[], object]) -> threading.Thread:
        """Make a thread on which a run can be launched for the calling one."""
        return threading.Thread(target=target, name="run", daemon=True)

    def _note_start(self, job: Job) -> None:
        job.standing.come_up(job.num_processes)
        notify(f"Started {self.training.format(job.num_processes)}")

    def _node(self, job: Job, listener: socket.socket, env: Mapping[str, str]) -> NodeSpec:
        return NodeSpec(
            run_id=job.run_id,
            attempt=job.attempt,
            host=socket.gethostname(),
            address=LOOPBACK,
            ranks_per_node=job.num_processes,
            master_addr=LOOPBACK,
            master_port=listener.getsockname()[1],
            gpus=self.gpus,
            env=env,
            program_name=job.program.name,
            modules=os.pathsep.join(folders_of(job.settings.py_modules)),
        )


def _memory_warnings(job: Job) -> Iterator[NodeWarning]:
    return memory_warnings(
        job.num_processes,
        1,
        warm=job.settings.warm and is_supported(),
        is_warm=lambda: zygote_client.is_warm(os.getpid()),
    )


def cool_down() -> None:
    """End the warm process of this one's local runs, if there is one; runs that go on do so."""
    zygote_client.shut_down(os.getpid())


def _zygote_spec(
    settings: Settings, num_processes: int, env: Mapping[str, str], interpreter: Interpreter
) -> ZygoteSpec | None:
    if not settings.warm:
        return None
    return ZygoteSpec(
        owner=os.getpid(),
        environment=common_environment(num_processes, env, os.environ),
        preload=tuple(settings.preload),
        interpreter=interpreter,
    )
