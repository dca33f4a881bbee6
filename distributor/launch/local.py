"""The launcher that runs all ranks on this machine, with an agent in the driver's process."""

from __future__ import annotations

import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import copy_context
from dataclasses import dataclass, replace

from distributor.core.addresses import port_range
from distributor.launch.hangs.stalls import Stall, StallWatch, activity_interval
from distributor.launch.job import Job
from distributor.launch.one_time_warnings import warn_about_nodes, warn_if_source_changed
from distributor.launch.output.messages import notify
from distributor.launch.settings import Settings, forwarded_env
from distributor.launch.spark.environments import prepared_here
from distributor.launch.spark.user_modules import folders_of, located_modules
from distributor.node.agent.agent import Agent
from distributor.node.agent.listener import BaseAgentListener
from distributor.node.agent.memory import memory_warnings
from distributor.node.agent.network import listen_for_ranks
from distributor.node.agent.node_spec import NodeSpec
from distributor.node.agent.node_warnings import node_warnings
from distributor.node.agent.output.sink import Sink
from distributor.node.agent.worker_env import common_environment
from distributor.node.process import zygote
from distributor.node.process.spawner import Interpreter, StartLimit
from distributor.node.process.supervisor import is_supported
from distributor.node.process.zygote import ZygoteSpec
from distributor.rank.messages import SECRET_BYTES
from distributor.serialization.outcome import Failure, Outcome
from distributor.serialization.program import in_file
from distributor.wire.messages import NodeWarning

LOOPBACK = "127.0.0.1"
NODE = 0
"""The number of the only node of a local run."""


@dataclass(frozen=True)
class LocalLauncher:
    """Runs every rank of a job on this machine.

    Parameters
    ----------
    gpus : tuple of str or None
        Entries for ``CUDA_VISIBLE_DEVICES``, one for each rank. If ranks use no GPUs, it is empty,
        which hides all GPUs, or None, which leaves the variable as it is.
    """

    gpus: tuple[str, ...] | None

    @property
    def shares_disk(self) -> bool:
        """Whether the ranks certainly reach the files of this machine: always True."""
        return True

    def training(self, num_processes: int) -> str:
        """Return how messages name a run of this size, as PySpark's class names it."""
        return f"local training with {num_processes} processes"

    def check(self, settings: Settings) -> None:
        """Do nothing: the plan has checked this machine."""

    def prepare(self, settings: Settings, num_processes: int) -> None:
        """Start the zygote in advance."""
        if settings.environment:
            return  # building it may take long, and perhaps no run follows
        env = {**forwarded_env(settings), **settings.env}
        zygote.prepare(_zygote_spec(settings, num_processes, env, Interpreter.current()))

    def resolve_size(self, job: Job) -> tuple[LocalLauncher, int]:
        """Return this launcher and the job's size, which the plan has adapted to this machine."""
        return self, job.num_processes

    def launch(self, job: Job, sink: Sink) -> list[Outcome]:
        """Run all ranks; return the outcomes of the ranks that ended by themselves.

        Raises
        ------
        StartTimeout, RunTimeout, RunStalled
            If ``start_timeout``, ``timeout`` or ``stall_timeout`` has passed.
        ExecutorNotReady
            If the environment cannot be prepared here, or none of ``rank_ports`` is free.
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
        located = located_modules(job.program, settings.py_modules)
        limit = StartLimit(start_deadline, job.cancellation.check)
        with (
            listen_for_ranks(LOOPBACK, ports) as store_socket,
            in_file(replace(job.program, located=located)) as program,
            zygote.open_spawner(zygote_spec, limit, interpreter) as spawner,
        ):
            listener = _LocalListener(job, sink, f"Started {self.training(job.num_processes)}")
            agent = Agent(
                self._node(job, store_socket, env),
                program,
                spawner,
                listener,
                store_socket=store_socket,
                data=job.datasets.file() if job.datasets else None,
                keep_all=job.keep_all,
                activity_interval=activity_interval(settings),
            )
            listener.attach(agent)
            job.stack_requests.send = agent.request_stacks
            job.cancellation.set_action(agent.stop)
            job.graceful_shutdown.start_attempt(lambda: agent.notify_preemption(here=True))
            notify(job.heading)
            with agent:
                outcomes = agent.run(start_deadline, settings.timeout or math.inf)
                job.cancellation.check()
                return outcomes

    def hint(self, error: Exception, job: Job) -> None:
        """Return None: the ranks find what this process finds."""

    def describe(self) -> dict[str, object]:
        """Return where the ranks run, as tags of the run's record."""
        return {"mode": "local", "nodes": 1, "gpus": len(self.gpus or ())}

    def thread(self, target: Callable[[], object]) -> threading.Thread:
        """Return a thread that can launch a run on behalf of the calling one."""
        context = copy_context()
        return threading.Thread(target=lambda: context.run(target), name="run", daemon=True)

    def _node(self, job: Job, store_socket: socket.socket, env: Mapping[str, str]) -> NodeSpec:
        return NodeSpec(
            run_id=job.run_id,
            attempt=job.attempt,
            host=socket.gethostname(),
            address=LOOPBACK,
            ranks_per_node=job.num_processes,
            master_addr=LOOPBACK,
            master_port=store_socket.getsockname()[1],
            gpus=self.gpus,
            env=env,
            program_name=job.program.name,
            modules=os.pathsep.join(folders_of(job.settings.py_modules)),
            secret=secrets.token_bytes(SECRET_BYTES),
        )


class _LocalListener(BaseAgentListener):
    """Passes an agent's events to the job, and its output to the job's sink.

    Its node is the whole run, so the agent is answered at once, as the driver would answer nodes.
    """

    def __init__(self, job: Job, sink: Sink, start_message: str) -> None:
        self._job = job
        self._start_message = start_message
        self._stalls = StallWatch(job.settings)
        self._stall: Stall | None = None
        self._agent: Agent
        self.write = sink.write
        self.has_room = sink.has_room

    def attach(self, agent: Agent) -> None:
        self._agent = agent

    def on_ranks_started(self) -> None:
        self._job.progress.add_started(self._job.num_processes)
        self._job.notify(self._start_message, self._job.settings.spelling.logger)

    def on_rank_failed(self, failure: Failure) -> None:
        self._job.failures.append(failure)

    def on_idle(self, seconds: float) -> None:
        self._stalls.note(NODE, seconds)
        if stall := self._stalls.check({NODE}):
            self._stall = stall
            self._agent.request_stacks()

    def on_stacks(self, stacks: dict[int, str]) -> None:
        self._job.stack_requests.answer(stacks)
        stall, self._stall = self._stall, None
        if stall:
            stall.report(stacks)

    def on_work_done(self) -> None:
        self._agent.release()

    def on_preemption_subscribed(self) -> None:
        self._job.graceful_shutdown.subscribe()

    def on_sigterm(self) -> None:
        self._job.preempted[socket.gethostname()] = list(range(self._job.num_processes))
        self._agent.notify_preemption(here=True)


def _memory_warnings(job: Job) -> Iterator[NodeWarning]:
    return memory_warnings(
        job.num_processes,
        1,
        warm=job.settings.warm and is_supported(),
        is_warm=lambda: zygote.is_warm(os.getpid()),
    )


def cool_down() -> None:
    """Shut down this process's zygote, if it has one. Active runs are unaffected.

    The zygote is the warm process from which the ranks of local runs are forked. It also ends with
    this process, or after half an hour without a run. The next run starts a new one.

    Examples
    --------
    >>> distributor.cool_down()
    """
    zygote.shut_down(os.getpid())


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
