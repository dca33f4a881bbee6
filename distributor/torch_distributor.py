"""TorchDistributor: PySpark's class, with return values, errors and clean-up."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, overload

from distributor.core.checkpoint_config import CheckpointSettings, absolute
from distributor.core.redaction import Redaction
from distributor.launch import retry
from distributor.launch.call_site import CallSite
from distributor.launch.future import RunFuture
from distributor.launch.job import (
    Job,
    Launcher,
    Settings,
    check_num_processes,
    new_run_id,
    program_of,
)
from distributor.launch.local import LocalLauncher
from distributor.launch.spark.plan import plan_cluster, plan_local
from distributor.launch.spark.session import Session
from distributor.serialization.code_mentions import call_mentions, script_mentions
from distributor.serialization.program import Program, Script
from distributor.tracking.recorder import Recorder
from distributor.tracking.run import TrackedRun, describe_job, open_run, rank_environment

P = ParamSpec("P")
R = TypeVar("R")
LOOK_AT_STORAGE = "distributor.train.runtime.reporter:look_at_storage"
"""What ranks begin with where they keep checkpoints."""


@dataclass(frozen=True)
class TorchDistributor(Settings):
    """Runs a PyTorch function or script on several ranks, here or as a Spark barrier job.

    A drop-in for ``pyspark.ml.torch.distributor.TorchDistributor``. What it takes is checked
    where it is built: GPUs that are not there, or a Spark configuration that cannot work, are
    errors before anything is launched.

    Parameters
    ----------
    num_processes : int or (int, int)
        How many ranks. In local mode with GPUs it is cut, with a warning, to the GPUs there are.
        A pair is (minimum, maximum): each attempt takes as many as there is room for.
    local_mode : bool
        True: ranks on this machine, no Spark needed. False: on the executors of the active
        Spark session, classic or Connect.
    use_gpu : bool
        Whether each rank has a GPU. Without, GPUs are hidden from the ranks.
    env : mapping of str to str, optional
        Environment variables for every rank.
    forward_env : sequence of str
        Variables of this process that every rank has too, by name or pattern, such as "HF_*".
    timeout : float, optional
        Seconds that the run may take once its ranks have started, each attempt anew; None for no
        bound.
    start_timeout : float
        Seconds that may pass until all ranks are up, the wait for free slots included.
    log_dir : str or path, optional
        Folder on the driver that keeps every rank's whole output, in files such as
        ``<log_dir>/<run id>/attempt_0/rank3.stderr``. A node without a link to the driver writes
        its ranks' files there on its own disk. The default is that of DISTRIBUTOR_LOG_DIR,
        spark.distributor.logDir, or none.
    show_output : "all", "none" or ranks
        Whose output is shown here as it comes.
    hub_address : str, optional
        Where this process listens for the nodes: ``host``, ``host:port``, ``[IPv6]`` or
        ``[IPv6]:port``; by default the address of Spark's driver and `hub_port`.
    hub_port : int
        The port, unless `hub_address` has one; 0 for a free one. All runs of this process share it.
        The default is that of DISTRIBUTOR_HUB_PORT, spark.distributor.hub.port, or 0.
    rank_ports : str, optional
        The ports that rank 0's store may have, such as "29500-29599"; each run takes one. The
        default is that of DISTRIBUTOR_RANK_PORTS, spark.distributor.rank.ports, or any free port.
    warm : bool
        Whether ranks are forked from a process that each node keeps, with torch imported, for this
        and later runs; otherwise, and always on macOS, each starts a fresh interpreter. The
        default is that of DISTRIBUTOR_WARM (0 or 1), spark.distributor.warm, or True.
    preload : sequence of str
        Modules that this process imports too; none of them may touch CUDA or start threads.
    gpu_type : GPUType or str, optional
        What the GPUs have to be, such as "H100", in either case; by default anything.
    pool : str, optional
        The pool of Spark's fair scheduler in which the job waits for slots; by default the one
        that the calling thread has set.
    mlflow_ranks : "first" or "all"
        Whose calls of MLflow log to the job's run; the others' do nothing.
    storage_path : str or path, optional
        Where ``distributor.train.report`` keeps checkpoints: a path that all nodes see, or an
        address such as ``s3://bucket/runs``.
    name : str, optional
        The folder in it. A name that is used again goes on from what is there; by default it is
        the run's own.
    max_failures : int
        How many attempts may fail, by a rank's exception or by the death of a rank, executor or
        host, before the run does; -1 for any number. The next attempt's ranks find the latest
        checkpoint with ``distributor.train.get_checkpoint``. The same exception at the same step
        ends the run.
    environment : path or sequence of str, optional
        What ranks run in: a packed virtual environment (venv-pack, conda-pack), or requirements
        that pip installs once on each node; by default the interpreter that is there.
    py_modules : sequence of str or path
        Modules and packages, by name, and files and folders, by path, that ranks can import, beside
        those that the program imports by a statement: plug-ins that are imported by a computed
        name, say.
    listeners : sequence of Listener
        Who hears in this process what the ranks print, tell and report.

    Raises
    ------
    TypeError, ValueError
        For a setting that makes no sense.
    RuntimeError
        Where GPUs are asked for and there are none, where the cluster demands encryption, or
        where distributed mode finds no Spark session.

    Examples
    --------
    >>> def train(learning_rate):
    ...     import torch.distributed as dist
    ...     dist.init_process_group("gloo")
    ...     return dist.get_world_size()
    >>> TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).run(train, 1e-3)
    2
    """

    num_processes: int | tuple[int, int] = 1
    local_mode: bool = True
    use_gpu: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        # Frozen for its users; what they gave is settled here, once.
        min_processes, max_processes = check_num_processes(self.num_processes)
        launcher, planned = self._plan(min_processes, max_processes)
        settled = planned if min_processes == max_processes else (min_processes, planned)
        object.__setattr__(self, "num_processes", settled)
        launcher.prepare(self, planned)

    @overload
    def run(self, train_object: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    def run(self, train_object: str | os.PathLike[str], *args: object) -> None: ...

    def run(self, train_object: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a function or a script on every rank, and give what rank 0 returned.

        Parameters
        ----------
        train_object : callable or path
            What each rank runs: any callable, or a Python script.
        *args
            Its arguments; for a script, the words of its command line.
        **kwargs
            Its keyword arguments; a script has none.

        Returns
        -------
        object
            Rank 0's value; None for a script.

        Raises
        ------
        Exception
            What the failing rank raised, with its own type and arguments. Its cause is the remote
            traceback, and its ``rank_failures`` maps each failed rank to its failure, the cause
            first. `WorkerDied` where a rank ended without a word, `RemoteError` where its
            exception cannot be rebuilt here.
        RunTimeout, StartTimeout
            Where a deadline passed.
        """
        return self._run(False, train_object, args, kwargs)[0]

    @overload
    def run_all(
        self, train_object: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]: ...

    @overload
    def run_all(self, train_object: str | os.PathLike[str], *args: object) -> list[None]: ...

    def run_all(self, train_object: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Do as `run` does, and give what every rank returned, in rank order."""
        return self._run(True, train_object, args, kwargs)

    @overload
    def submit(
        self, train_object: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> RunFuture[R]: ...

    @overload
    def submit(self, train_object: str | os.PathLike[str], *args: object) -> RunFuture[None]: ...

    def submit(self, train_object: Any, *args: Any, **kwargs: Any) -> RunFuture[Any]:
        """Begin what `run` does, and give a future of rank 0's value; bad input is raised here.

        Returns
        -------
        RunFuture
            A `concurrent.futures.Future` whose ``cancel()`` ends the run.
        """
        return self._submit(lambda values: values[0], False, train_object, args, kwargs)

    @overload
    def submit_all(
        self, train_object: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> RunFuture[list[R]]: ...

    @overload
    def submit_all(
        self, train_object: str | os.PathLike[str], *args: object
    ) -> RunFuture[list[None]]: ...

    def submit_all(self, train_object: Any, *args: Any, **kwargs: Any) -> RunFuture[list[Any]]:
        """Begin what `run_all` does, and give a future of every rank's value, in rank order."""
        return self._submit(lambda values: values, True, train_object, args, kwargs)

    def _submit(
        self,
        pick: Callable[[list[Any]], Any],
        keep_all: bool,
        train_object: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> RunFuture[Any]:
        job, launcher, recorder = self._prepare(keep_all, train_object, args, kwargs)
        future = RunFuture(lambda: pick(self._follow(job, launcher, recorder)), job.cancellation)
        launcher.thread(future.follow).start()
        return future

    def _run(
        self, keep_all: bool, train_object: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        return self._follow(*self._prepare(keep_all, train_object, args, kwargs))

    def _prepare(
        self, keep_all: bool, train_object: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Job, Launcher, Recorder | None]:
        program = program_of(train_object, args, kwargs)
        if self.storage_path is not None:
            program = replace(program, begins_with=LOOK_AT_STORAGE)
        min_processes, max_processes = check_num_processes(self.num_processes)
        launcher, num_processes = self._plan(min_processes, max_processes)
        run_id = new_run_id()
        where = {"num_processes": num_processes, "use_gpu": self.use_gpu, **launcher.describe()}
        tracking = open_run(
            program.name,
            describe_job(run_id, where),
            launcher.shares_disk,
            lambda: _mentions_mlflow(program, train_object, args, kwargs),
        )
        of_run = rank_environment(tracking, self.mlflow_ranks)
        env = {**of_run, **self._checkpoint_settings(run_id), **self.forwarded, **self.env}
        recorder = (
            Recorder(tracking, self.mlflow_ranks, Redaction(env))
            if isinstance(tracking, TrackedRun)
            else None
        )
        job = Job(
            program=program,
            num_processes=num_processes,
            min_processes=min_processes,
            settings=self,
            env=env,
            listeners=(*([recorder] if recorder else []), *self.listeners),
            keep_all=keep_all,
            run_id=run_id,
            call_site=CallSite.of_caller(program.name),
        )
        return job, launcher, recorder

    def _checkpoint_settings(self, run_id: str) -> dict[str, str]:
        if self.storage_path is None:
            return {}
        path = absolute(self.storage_path)  # ranks may have another working folder
        return CheckpointSettings(storage_path=path, name=self.name or run_id).to_variable()

    def _follow(self, job: Job, launcher: Launcher, recorder: Recorder | None) -> list[Any]:
        recorded: AbstractContextManager[object] = recorder or nullcontext()
        with job.preemption, recorded:
            return retry.run(job, launcher)

    def _plan(self, min_processes: int, max_processes: int) -> tuple[Launcher, int]:
        """Choose the launcher, and the most ranks that it can start."""
        if self.local_mode:
            plan = plan_local(min_processes, max_processes, self.use_gpu, self.wanted_type)
            return LocalLauncher(plan.gpus), plan.num_processes
        from distributor.launch.spark.launcher import (
            SparkLauncher,  # local mode does without its imports
        )

        session = Session.require_active()
        cluster = plan_cluster(session, max_processes, self.use_gpu, self.pool)
        return SparkLauncher(session, cluster), max_processes


def _mentions_mlflow(
    program: Program, train_object: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    if isinstance(program, Script):
        return script_mentions("mlflow", Path(program.path))
    return call_mentions("mlflow", train_object, args, kwargs)
