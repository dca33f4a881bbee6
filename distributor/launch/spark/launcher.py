"""The launcher that runs one barrier task per node on Spark's executors."""

from __future__ import annotations

import os
import pickle
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from distributor.core.addresses import bare, joined, port_range, split_address
from distributor.core.resources import format_bytes
from distributor.core.text import counted
from distributor.errors import DistributorError, StartTimeout
from distributor.launch.cancellation import Cancellation
from distributor.launch.defaults import conf_cache_dir
from distributor.launch.job import Job
from distributor.launch.local import LOOPBACK
from distributor.launch.one_time_warnings import warn_once
from distributor.launch.output.messages import notify, warn
from distributor.launch.settings import Settings, gpu_type_of
from distributor.launch.spark.environments import shipped_environment
from distributor.launch.spark.error_translation import MORE_SLOTS
from distributor.launch.spark.log_quieting import quiet
from distributor.launch.spark.memory import container_shortage
from distributor.launch.spark.monitor.run_monitor import RunMonitor
from distributor.launch.spark.monitor.task_starts import TaskStarts
from distributor.launch.spark.package_shipping import portable_task, shipped_program
from distributor.launch.spark.plan import ClusterPlan
from distributor.launch.spark.polling import Reminder, poll_until
from distributor.launch.spark.session import BarrierJob, Session
from distributor.launch.spark.slot_shortage import why_few_slots, why_not_started
from distributor.launch.spark.user_modules import shipped_modules
from distributor.node.agent.network import source_address
from distributor.node.agent.output.sink import Sink
from distributor.node.spark_task.result_rows import ROW_SCHEMA
from distributor.node.spark_task.task_spec import TaskSpec
from distributor.serialization.outcome import Outcome
from distributor.serialization.pickling import heaviest
from distributor.serialization.program import Call, Program
from distributor.wire.hub import Hub


@dataclass(frozen=True)
class SparkLauncher:
    """Runs a job's ranks in one barrier job.

    Parameters
    ----------
    session : Session
        The Spark session.
    plan : ClusterPlan
        How many tasks, and what each of them has.
    """

    session: Session
    plan: ClusterPlan

    @property
    def shares_disk(self) -> bool:
        """Whether the ranks certainly reach files that are on this machine."""
        return self.session.is_one_machine

    def training(self, num_processes: int) -> str:
        """Return how messages name a run of this size, as PySpark's class names it."""
        return self.plan.training(num_processes)

    def prepare(self, settings: Settings, num_processes: int) -> None:
        """Nothing: executors may not be there yet, and their first run makes them warm."""

    def resolve_size(self, job: Job) -> tuple[SparkLauncher, int]:
        """Give the launcher of as many of the job's ranks as there is room for, and how many.

        Executors that are on their way are waited for, for a while. Through Connect nobody can
        tell what room there is, and it is that of all ranks.
        """
        self._await_removal(job.silent, job.cancellation)
        per_task = self.plan.ranks_per_task
        least, most = -(-job.min_processes // per_task), self.plan.num_tasks
        if least < most:
            most = max(least, min(most, self._room_for(most, job.cancellation)))
        return replace(self, plan=self.plan.of(most)), most * per_task

    def _await_removal(self, silent: tuple[str, ...], cancellation: Cancellation) -> None:
        """Wait until Spark has given up hosts too, on which it would start tasks until then."""
        poll_until(
            lambda: self.session.executor_hosts() & set(silent) or None,
            time.monotonic() + REMOVAL_SECONDS,
            cancellation,
            lambda left: f"Spark still counts on executors on {', '.join(sorted(left))}.",
        )

    def _room_for(self, most: int, cancellation: Cancellation) -> int:
        """Give how many tasks fit, once these do or some time has passed."""
        ever = self.session.most_slots()
        wanted = most if ever is None else min(most, ever)
        deadline = time.monotonic() + ROOM_SECONDS
        slots = poll_until(lambda: self._too_few(wanted), deadline, cancellation)
        return wanted if slots is None else slots

    def launch(self, job: Job, sink: Sink) -> list[Outcome]:
        """Run all ranks; give the outcomes of those that ended by themselves.

        Raises
        ------
        OSError
            If ``hub_address`` or ``hub_port`` cannot be bound.
        StartTimeout, RunTimeout
            Where a deadline passed.
        ExecutorNotReady
            Where an executor lacks what a rank needs.
        """
        deadline = time.monotonic() + job.settings.start_timeout
        reminder = Reminder()
        secret = secrets.token_bytes(32)
        address = hub_address(self.session, job.settings.hub_address, job.settings.hub_port)
        with open_hub(address, secret) as hub:
            notify(job.heading)
            self._await_slots(deadline, job.cancellation, reminder)
            shortage = self._warn_of_memory(job.settings.warm)
            spec = self._spec(job, (address.told, hub.port), secret, check_memory=not shortage)
            task = portable_task(self.session, pickle.dumps(spec, protocol=5))
            frame = self.session.barrier_frame(
                task, self.plan.num_tasks, ROW_SCHEMA, self._profile()
            )
            with (
                quiet(self.session),
                RunMonitor(
                    job, self.plan, hub, sink, deadline, self.session.leaving_executors
                ) as monitor,
                BarrierJob(
                    self.session,
                    frame,
                    job.run_id,
                    monitor.job_ended,
                    description=f"{job.program.name} on {counted(job.num_processes, 'rank')}",
                    call_site=job.call_site,
                    pool=job.settings.pool,
                ) as barrier_job,
            ):
                tasks = TaskStarts(
                    self.plan.num_tasks,
                    barrier_job.has_begun,
                    lambda: self._why_not_started(barrier_job.other_running_tasks()),
                    reminder,
                )
                return monitor.follow(barrier_job.cancel, tasks)

    def _profile(self) -> Any:
        gpus = self.plan.profile_gpus
        return self.session.gpu_profile(gpus) if gpus else None

    def describe(self) -> dict[str, object]:
        """Say where ranks are launched, for the record."""
        ranks = self.plan.num_tasks * self.plan.ranks_per_task
        return {
            "mode": "cluster",
            "nodes": self.plan.num_tasks,
            "gpus": ranks if self.plan.use_gpu else 0,
            "application_id": self.session.conf("spark.app.id"),
        }

    def thread(self, target: Callable[[], object]) -> threading.Thread:
        """Make a thread on which a run can be launched for the calling one."""
        return self.session.thread(target)

    def _await_slots(self, deadline: float, cancellation: Cancellation, reminder: Reminder) -> None:
        """Wait until the executors could hold all tasks: a job submitted earlier sleeps 15 s."""
        wanted, most = self.plan.num_tasks, self.session.most_slots()
        if most is not None and most < wanted:
            raise DistributorError(
                f"{wanted} barrier tasks are wanted at once, and the executors of "
                f"{self.session.master} never have room for more than {most}. {MORE_SLOTS}"
            )

        def shortage(slots: int) -> str:
            return why_few_slots(self.session, self.plan, slots)

        slots = poll_until(
            lambda: self._too_few(wanted), deadline, cancellation, shortage, reminder
        )
        if slots is not None:
            raise StartTimeout(shortage(slots))

    def _why_not_started(self, other_tasks: int) -> str:
        slots = self.session.slots(self._profile())
        has_room = slots is not None and slots >= self.plan.num_tasks
        return why_not_started(other_tasks, has_room=has_room)

    def _too_few(self, wanted: int) -> int | None:
        """Give how many tasks there is room for, where that is fewer than wanted."""
        slots = self.session.slots(self._profile())
        return slots if slots is not None and slots < wanted else None

    def _sendable(self, program: Program) -> Program | str:
        if program.size <= LARGE_PROGRAM:
            return program
        if isinstance(program, Call):
            path, weight = heaviest(*program.call.load())
            notify(
                f"'{program.name}' takes {format_bytes(program.size)} to the ranks, "
                f"{format_bytes(weight)} of it in {path}. Spark brings it to each executor once."
            )
        return shipped_program(self.session, program)

    def _warn_of_memory(self, warm: bool) -> bool:
        """Warn if the configuration tells that executors are too small; return whether it does."""
        conf, plan = self.session.conf, self.plan
        shortage = container_shortage(conf, plan.num_tasks, plan.ranks_per_task, warm=warm)
        if shortage:
            warn_once(shortage)
        return shortage is not None

    def _spec(
        self, job: Job, hub: tuple[str, int], secret: bytes, *, check_memory: bool
    ) -> TaskSpec:
        log_dir, tasks = job.settings.log_dir, self.plan.num_tasks
        max_bytes = self.session.most_result_bytes()
        return TaskSpec(
            run_id=job.run_id,
            attempt=job.attempt,
            program=self._sendable(job.program),
            program_name=job.program.name,
            ranks_per_node=self.plan.ranks_per_task,
            keep_all=job.keep_all,
            env=dict(job.env),
            use_gpu=self.plan.use_gpu,
            driver_gpus=self.plan.driver_gpus,
            hub=hub,
            secret=secret,
            log_dir=None if log_dir is None else os.fspath(log_dir),
            max_spark_result_bytes=max_bytes // (tasks if job.keep_all else 1),
            rendezvous_timeout=job.settings.start_timeout,
            timeout=job.settings.timeout,
            warm=job.settings.warm,
            preload=tuple(job.settings.preload),
            gpu_type=gpu_type_of(job.settings),
            modules=shipped_modules(self.session, job.program, job.settings.py_modules),
            environment=shipped_environment(self.session, job.settings.environment),
            rank_ports=port_range("rank_ports", job.settings.rank_ports),
            cache_dir=conf_cache_dir(self.session),
            check_memory=check_memory,
        )


LARGE_PROGRAM = 512 * 1024
"""Bytes from which a program does not travel with Spark's task, which would bring it each time.

PySpark writes a task of a megabyte or more to disk, and with it the ranks' variables.
"""
REMOVAL_SECONDS = 240.0
"""Seconds within which Spark notices, by its defaults, that an executor no longer answers."""
ROOM_SECONDS = 10.0
"""Seconds for executors to register, those that replace dead ones too, where fewer would do."""


@dataclass(frozen=True)
class HubAddress:
    """Where the hub listens, and what the nodes are told of it.

    Parameters
    ----------
    bound, told : str
        This process's address, and the one that the nodes connect to.
    port : int
        0 for any.
    chosen_by : str
        The setting that the user has chosen it by; empty if there is none.
    """

    bound: str
    told: str
    port: int = 0
    chosen_by: str = ""


def hub_address(session: Session, wish: str | None, port: int = 0) -> HubAddress:
    """Choose where the hub listens.

    By default it listens only where Spark's driver does. A Connect client is not where the driver
    is, so there it is the address from which the client reaches the driver.
    """
    driver = bare(session.conf("spark.driver.host") or LOOPBACK)
    bound = bare(session.conf("spark.driver.bindAddress") or driver)
    if wish is not None:
        host, wished_port = split_address("hub_address", wish)
        return HubAddress(
            bound if host == driver else host, host, wished_port or port, "hub_address"
        )
    if session.is_connect:
        bound = driver = _towards(driver)
    return HubAddress(bound, driver, port, "hub_port" if port else "")


def open_hub(address: HubAddress, secret: bytes) -> Hub:
    """Bind the hub; if the user has chosen nothing, an error costs the run no more than the hub.

    Raises
    ------
    OSError
        If ``hub_address`` or ``hub_port`` cannot be bound.
    """
    try:
        return Hub(address.bound, secret, port=address.port)
    except OSError as error:
        where = joined(address.bound, address.port or "(any port)")
        if address.chosen_by:
            raise OSError(
                f"{address.chosen_by} cannot be bound at {where}: {error}. Name an address of "
                "this machine that the executors can reach, and a port that is free (0 takes any)."
            ) from error
        warn(f"No hub at {where}: {error}. Ranks' output will not be shown here.")
        return Hub(LOOPBACK, secret)


def _towards(host: str) -> str:
    try:
        return source_address(host)
    except OSError:
        return LOOPBACK  # nodes elsewhere then go without the hub
