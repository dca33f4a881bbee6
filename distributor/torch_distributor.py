"""`TorchDistributor`: PySpark's class, with return values, errors and clean-up.

`prepare_run` builds the run of one call: program, plan, MLflow run and environment variables.
"""

from __future__ import annotations

import logging
import os
import pkgutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import Field, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, ParamSpec, TypeVar, overload

from distributor.control.attempts import execute
from distributor.control.future import RunFuture, start_run
from distributor.control.run import Datasets, Launcher, Run
from distributor.control.waiting import interruptible
from distributor.core.addresses import host_name
from distributor.core.cell_errors import ends_at_caller
from distributor.core.files import absolute, removed_if_empty, shown
from distributor.core.rank_variables import NAMED_SERVER, CheckpointSettings
from distributor.core.spelling import Spelling, checks_keywords
from distributor.core.text import Redaction, printable, table_of
from distributor.core.versions import require_spark, software
from distributor.data.dataframes import (
    DatasetFinder,
    SparkDataset,
    from_spark,
    get_spark_partition_data_loader,
)
from distributor.launchers.local import LocalLauncher, prepare_zygote
from distributor.programs import program_of
from distributor.report.event_log import EventLog, user_name
from distributor.report.run_events import RunEvents
from distributor.run_spec import (
    RunSpec,
    Settings,
    check_recovery,
    check_shown_ranks,
    forwarded_env,
    gpu_type_of,
    ignored_settings,
    new_run_id,
)
from distributor.screen.messages import RunLabel, warn, warn_once
from distributor.screen.run_block import RunBlock
from distributor.serialization.program import Module, Program
from distributor.settings import (
    RANKS,
    SWITCH,
    AdminDefault,
    check_num_processes,
    documented,
    option,
    setting,
    setting_fields,
)
from distributor.spark.plan import plan_cluster, plan_local
from distributor.spark.session import Session
from distributor.spark.spark_job import CallSite
from distributor.tracking import Recorder, TrackedRun, Untracked, open_run
from distributor.version import __version__

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "TorchDistributor",
    "_get_spark_partition_data_loader",
    "get_spark_partition_data_loader",
]

P = ParamSpec("P")
R = TypeVar("R")
_get_spark_partition_data_loader = get_spark_partition_data_loader
"""The name that PySpark's module has for it."""

CHECK_STORAGE = "distributor.train.runtime.session:check_storage"
"""What ranks call first if they store checkpoints, so that bad storage fails before training."""

LATEST_CHECKPOINT = "distributor.train.storage.checkpoint_store:latest_checkpoint"
LATEST_POSITIONS = "distributor.train.storage.checkpoint_store:latest_positions"
"""What reads the name of a run's latest checkpoint, and its positions of data loaders."""

FIRST_GROUP = "what most runs need"

NOT_TRACKED = "MLflow is off: this run has no MLflow run of its own. Return the metrics."


@documented()
@checks_keywords
@dataclass(frozen=True, repr=False)
class TorchDistributor(Settings):
    """Runs a PyTorch function or script on several ranks, on this machine or on a Spark cluster.

    A drop-in replacement for `pyspark.ml.torch.distributor.TorchDistributor
    <https://spark.apache.org/docs/latest/api/python/reference/api/pyspark.ml.torch.distributor.TorchDistributor.html>`_.
    Ranks find the environment variables of `torchrun
    <https://docs.pytorch.org/docs/stable/elastic/run.html>`_. All settings are checked on
    construction: missing GPUs or a Spark configuration that cannot work raise an error before
    anything is launched.

    Parameters
    ----------
    {settings}

    Raises
    ------
    TypeError, ValueError, OSError
        If a setting is invalid. The message names the setting and its value.
    RuntimeError
        If there are no GPUs or too few, or if distributed mode finds no active Spark session.

    Attributes
    ----------
    num_tasks : int
        The number of Spark tasks; in local mode, as in PySpark's class, the number of ranks.
    input_params : dict
        ``num_processes``, ``local_mode``, ``use_gpu`` and ``num_tasks``, in a new dict each time.
    logger : logging.Logger
        Receives what PySpark's class logs; other messages go to the logger "distributor".
    spark : SparkSession or None
        The active Spark session.

    Examples
    --------
    >>> def train(learning_rate):
    ...     import torch.distributed as dist
    ...     dist.init_process_group("gloo")
    ...     return dist.get_world_size()
    >>> TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).run(train, 1e-3)
    2
    """

    spelling = Spelling(logger="TorchDistributor", hides_gpus=False)
    is_tracked: ClassVar[bool] = True  # whether a run is logged to MLflow, if MLflow is in use

    num_processes: int | tuple[int, int] = setting(
        1,
        RANKS,
        """Number of ranks. In local mode with GPUs it is reduced, with a warning, to the number
        of GPUs. A pair is (minimum, maximum): each attempt takes as many ranks as there is room
        for.""",
        group=FIRST_GROUP,
    )
    local_mode: bool = setting(
        True,
        SWITCH.with_options(
            option(
                "--cluster",
                action="store_false",
                help="run on Spark's executors instead of this machine",
            )
        ),
        """Whether ranks run on this machine, without Spark. If False, they run on the executors
        of the active Spark session, classic or Connect.""",
        group=FIRST_GROUP,
    )
    use_gpu: bool = setting(
        True,
        SWITCH.with_options(
            option("--gpu", action="store_true", help="one GPU per rank (default)"),
            option("--cpu", action="store_false", help="no GPUs"),
        ),
        """Whether each rank has a GPU. If False, GPUs are hidden from the ranks on executors, and
        those on this machine have its ``CUDA_VISIBLE_DEVICES``.""",
        group=FIRST_GROUP,
    )

    @interruptible
    def __post_init__(self) -> None:
        given = [field.name for field in setting_fields(self) if _is_given(self, field)]
        super().__post_init__()
        # The dataclass is frozen for its users; here the number of ranks is resolved, once.
        min_processes, max_processes = check_num_processes("num_processes", self.num_processes)
        check_shown_ranks(self, max_processes)
        check_recovery(self, max_processes)
        with self.spelling.renames():
            planned = plan(self, min_processes, max_processes)
        ranks = planned.num_processes
        resolved = ranks if min_processes == max_processes else (min_processes, ranks)
        object.__setattr__(self, "num_processes", resolved)
        vars(self)["_num_tasks"] = planned.num_tasks
        for message in ignored_settings(self, given):
            warn_once(message)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self._shown().items())})"

    def _repr_html_(self) -> str:
        return table_of(type(self).__name__, self._shown())

    def _shown(self) -> dict[str, Any]:
        """Return the ranks' number and place, and other settings that are not as by default.

        Those that may be secret are left out.
        """
        shown = {name: getattr(self, name) for name in ("num_processes", "local_mode", "use_gpu")}
        for each in setting_fields(self):
            if each.repr and (value := getattr(self, each.name)) != _default(each):
                shown.setdefault(each.name, value)
        return shown

    @property
    def num_tasks(self) -> int:
        """The number of Spark tasks; for ranks on this machine, the number of ranks."""
        return int(vars(self)["_num_tasks"])

    @property
    def input_params(self) -> dict[str, Any]:
        """A new dict with the names and values that PySpark's class keeps in its own."""
        names = ("num_processes", "local_mode", "use_gpu", "num_tasks")
        return {name: getattr(self, name) for name in names}

    @property
    def logger(self) -> logging.Logger:
        """The logger for what PySpark's class logs."""
        return logging.getLogger(self.spelling.logger)

    @property
    def spark(self) -> SparkSession | None:
        """The active Spark session."""
        session = Session.active()
        return None if session is None else session.spark

    @overload
    def run(self, train_object: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    def run(self, train_object: str | os.PathLike[str], *args: object) -> None: ...

    def run(self, train_object: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a function or a script on every rank, and return rank 0's value.

        Parameters
        ----------
        train_object : callable or path
            What each rank runs: any callable, or a Python script.
        *args
            Positional arguments of the callable, or command-line arguments of the script.
        **kwargs
            Keyword arguments of the callable. A script takes none.

        Returns
        -------
        object
            Rank 0's value; None for a script.

        Raises
        ------
        Exception
            The failed rank's own exception, with its type and arguments. Its cause is the remote
            traceback, and its ``rank_failures`` maps each failed rank to its failure, the cause
            first.
        WorkerDied
            If a rank was killed, crashed or exited.
        RemoteError
            If the rank's exception cannot be rebuilt in this process.
        StartTimeout, RunTimeout, RunStalled
            If ``start_timeout``, ``timeout`` or ``stall_timeout`` has passed.
        NodeLost
            If a node stopped answering, or its executor died.
        ExecutorNotReady
            If an executor lacks something that ranks need, such as torch.
        UnpicklableError
            If the callable, an argument or a value cannot be pickled.
        ValueTooLarge
            If a value cannot be sent to the driver; `load_value` reads it.
        TypeError, ValueError, OSError
            If `train_object` is not a callable or a Python script, a script has keyword arguments,
            or ``hub_address`` cannot be bound.
        RuntimeError
            If Spark's configuration requires encryption, or there are too few GPUs by now.
        DistributorError
            The base class of the errors of this package above, and raised itself if a returned
            value cannot be unpickled here.

        Examples
        --------
        >>> def square(x):
        ...     return x**2
        >>> TorchDistributor(2, use_gpu=False).run(square, 3)
        9
        >>> TorchDistributor(2, use_gpu=False).run("train.py", "--epochs=3")  # doctest: +SKIP
        """
        return execute(prepare_run(self, False, train_object, args, kwargs))

    @overload
    def run_all(
        self, train_object: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]: ...

    @overload
    def run_all(self, train_object: str | os.PathLike[str], *args: object) -> list[None]: ...

    def run_all(self, train_object: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a function or a script on every rank, and return the values of all ranks.

        Parameters
        ----------
        train_object : callable or path
            What each rank runs: any callable, or a Python script.
        *args
            Positional arguments of the callable, or command-line arguments of the script.
        **kwargs
            Keyword arguments of the callable. A script takes none.

        Returns
        -------
        list
            Every rank's value, in rank order.

        Raises
        ------
        Exception
            As `run` does.

        Examples
        --------
        >>> TorchDistributor(2, use_gpu=False).run_all(runtime.get_global_rank)
        [0, 1]
        """
        values: list[Any] = execute(prepare_run(self, True, train_object, args, kwargs))
        return values

    @overload
    def submit(
        self, train_object: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> RunFuture[R]: ...

    @overload
    def submit(self, train_object: str | os.PathLike[str], *args: object) -> RunFuture[None]: ...

    def submit(self, train_object: Any, *args: Any, **kwargs: Any) -> RunFuture[Any]:
        """Start a run in the background. Several runs may be active at the same time.

        A script that reaches its end waits for its active runs, and then shows the errors that it
        has not read. Ctrl-C ends the wait and the runs.

        Parameters
        ----------
        train_object : callable or path
            What each rank runs: any callable, or a Python script.
        *args
            Positional arguments of the callable, or command-line arguments of the script.
        **kwargs
            Keyword arguments of the callable. A script takes none.

        Returns
        -------
        RunFuture
            A `concurrent.futures.Future` of what `run` returns or raises. Its ``cancel()`` ends
            the run.

        Raises
        ------
        TypeError, ValueError, OSError, RuntimeError, UnpicklableError
            If the run cannot start, as `run` raises them. The future raises errors of the run.

        Examples
        --------
        >>> future = TorchDistributor(2, use_gpu=False).submit(square, 3)  # doctest: +SKIP
        >>> future.result()  # doctest: +SKIP
        9
        """
        return start_run(prepare_run(self, False, train_object, args, kwargs))

    @overload
    def submit_all(
        self, train_object: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> RunFuture[list[R]]: ...

    @overload
    def submit_all(
        self, train_object: str | os.PathLike[str], *args: object
    ) -> RunFuture[list[None]]: ...

    def submit_all(self, train_object: Any, *args: Any, **kwargs: Any) -> RunFuture[list[Any]]:
        """Start a run in the background, as `submit` does, for the values of all ranks.

        Parameters
        ----------
        train_object : callable or path
            What each rank runs: any callable, or a Python script.
        *args
            Positional arguments of the callable, or command-line arguments of the script.
        **kwargs
            Keyword arguments of the callable. A script takes none.

        Returns
        -------
        RunFuture
            A `concurrent.futures.Future` of what `run_all` returns or raises. Its ``cancel()``
            ends the run.

        Raises
        ------
        TypeError, ValueError, OSError, RuntimeError, UnpicklableError
            If the run cannot start, as `run` raises them. The future raises errors of the run.

        Examples
        --------
        >>> ranks = TorchDistributor(2, use_gpu=False)  # doctest: +SKIP
        >>> ranks.submit_all(runtime.get_global_rank).result()  # doctest: +SKIP
        [0, 1]
        """
        return start_run(prepare_run(self, True, train_object, args, kwargs))

    def train_on_dataframe(
        self,
        train_function: Callable[..., R],
        spark_dataframe: DataFrame,
        *args: Any,
        **kwargs: Any,
    ) -> R:
        """Run a function whose ranks read their parts of a DataFrame through a data loader.

        The function calls `get_spark_partition_data_loader`. To pass DataFrames as arguments, use
        `run`.

        Follows ``TorchDistributor._train_on_dataframe`` of PySpark, but with any number of
        partitions.

        Parameters
        ----------
        train_function : callable
            What each rank runs.
        spark_dataframe : pyspark.sql.DataFrame
            The DataFrame. Its rows are divided among the ranks, whose numbers of rows differ by at
            most one.
        *args, **kwargs
            Arguments of the function.

        Returns
        -------
        object
            Rank 0's value.

        Raises
        ------
        ValueError
            If ``local_mode`` is True, as in PySpark's class, or there are fewer rows than ranks.
        TypeError
            If `spark_dataframe` is not a DataFrame.
        Exception
            As `run` raises them.

        Examples
        --------
        >>> def train(num_samples):
        ...     loader = get_spark_partition_data_loader(num_samples, batch_size=32)
        ...     for features, labels in loader:
        ...         ...
        >>> ranks = TorchDistributor(2, local_mode=False, use_gpu=False)  # doctest: +SKIP
        >>> ranks.train_on_dataframe(train, df, 1000)  # doctest: +SKIP
        """
        if self.local_mode:
            raise ValueError(
                "TorchDistributor.train_on_dataframe requires setting "
                "TorchDistributor.local_mode to False. (run takes DataFrames in local mode too.)"
            )
        finder = DatasetFinder()
        finder.add(from_spark(spark_dataframe, equal=False), "spark_dataframe")
        value: R = execute(prepare_run(self, False, train_function, args, kwargs, finder))
        return value

    _train_on_dataframe = train_on_dataframe

    def _latest_checkpoint(self, settings: CheckpointSettings) -> str | None:
        """Return the name of the checkpoint from which a run resumes; None if it has none."""
        if self.name is None:  # the run has a new folder
            return None
        latest: str | None = pkgutil.resolve_name(LATEST_CHECKPOINT)(settings)
        return latest

    def _stored_positions(self, settings: CheckpointSettings) -> Mapping[str, Any]:
        """Return the positions of data loaders from which the next attempt resumes."""
        positions: Mapping[str, Any] = pkgutil.resolve_name(LATEST_POSITIONS)(settings)
        return positions

    def _program_of(
        self, train_object: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Program:
        """Return what ranks run for these arguments of ``run``."""
        return program_of(train_object, args, kwargs)


def _is_given(settings: Settings, field: Field[Any]) -> bool:
    value = getattr(settings, field.name)
    # `dataclasses.replace` passes the values of all settings.
    return value is not None and value is not field.default and value != _default(field)


def _default(field: Field[Any]) -> Any:
    default = field.metadata["default"]
    return default.value if isinstance(default, AdminDefault) else default


class Planned(NamedTuple):
    """How the ranks will be started.

    Parameters
    ----------
    launcher : Launcher
        Starts the ranks.
    num_processes : int
        The number of ranks, or the maximum.
    num_tasks : int
        The number of Spark tasks; for ranks on this machine, the number of ranks.
    """

    launcher: Launcher
    num_processes: int
    num_tasks: int


def plan(settings: TorchDistributor, min_processes: int, max_processes: int) -> Planned:
    """Plan the ranks: their number, their launcher and their GPUs."""
    if settings.local_mode:
        gpu_type, spelling = gpu_type_of(settings), settings.spelling
        local = plan_local(min_processes, max_processes, settings.use_gpu, gpu_type)
        if (count := local.num_processes) < min_processes:
            warn(
                f"'{spelling.num_processes}' cannot be set to a value greater than the number of "
                f"available GPUs on the driver, which is {count}. '{spelling.num_processes}' was "
                "reset to be equal to the number of available GPUs.",
                spelling.logger,
            )
        gpus = local.gpus if settings.use_gpu or spelling.hides_gpus else None
        return Planned(LocalLauncher(gpus), count, count)
    session = Session.require_active()
    if settings.executor_resources:
        requested = {key: str(value) for key, value in settings.executor_resources.items()}
        session = Session(session.spark, requested)
    # They need pyarrow and NumPy.
    from distributor.launchers.spark.launcher import BarrierLauncher, GangLauncher

    cluster = plan_cluster(
        session,
        max_processes,
        settings.use_gpu,
        settings.pool,
        # Spark ends a barrier stage with one of its executors.
        False if settings.recovery == "in_place" else settings.barrier,
        gpu_sharing=settings.gpu_sharing,
    )
    kind = BarrierLauncher if cluster.barrier else GangLauncher
    return Planned(kind(session, cluster), max_processes, cluster.num_tasks)


@ends_at_caller
@interruptible
def prepare_run(
    settings: TorchDistributor,
    keep_all: bool,
    train_object: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    finder: DatasetFinder | None = None,
    tracked: Callable[..., TrackedRun | Untracked] | None = None,
) -> Run:
    """Build the run of one call, without starting it.

    Parameters
    ----------
    settings : TorchDistributor
        The user's settings.
    keep_all : bool
        Whether the values of all ranks are wanted.
    train_object, args, kwargs
        The arguments of ``run``.
    finder : DatasetFinder, optional
        Has the datasets that ranks get without being passed them as arguments.
    tracked : callable, optional
        Returns the MLflow run, for the arguments of `open_run`, which does so by default.
    """
    finder = finder or DatasetFinder()
    args, kwargs = finder.replace_in(args, kwargs, train_object)
    _check_datasets(finder.datasets, train_object, args)
    min_processes, max_processes = check_num_processes("num_processes", settings.num_processes)
    with settings.spelling.renames():
        program = settings._program_of(train_object, args, kwargs)
        launcher, num_processes, _ = plan(settings, min_processes, max_processes)
        launcher.check(settings)
    if settings.storage_path is not None:
        program = replace(program, begins_with=CHECK_STORAGE)
    run_id = new_run_id()
    env = {**_checkpoint_variables(settings, run_id), **forwarded_env(settings), **settings.env}
    checkpoints = CheckpointSettings.from_env(env)
    facts = {"num_processes": num_processes, "use_gpu": settings.use_gpu, **launcher.describe()}
    tracking: TrackedRun | Untracked = Untracked(NAMED_SERVER, NOT_TRACKED)
    if settings.is_tracked:
        tracking = (tracked or open_run)(
            printable(program.name),
            {"run_id": run_id, **facts},
            launcher.shares_disk,
            lambda: program.mentions(b"mlflow"),
        )
    env = {**tracking.rank_environment(settings.mlflow_ranks), **env}
    label = RunLabel(printable(program.name))
    recorder = (
        Recorder(tracking, settings.mlflow_ranks, Redaction(env), label)
        if isinstance(tracking, TrackedRun)
        else None
    )
    spec = RunSpec(
        program=program,
        num_processes=num_processes,
        min_processes=min_processes,
        settings=settings,
        env=env,
        keep_all=keep_all,
        run_id=run_id,
    )
    # A study's trials, and runs that this package makes by itself, would displace the user's.
    has_log = settings.event_log and settings.is_tracked and tracked is None
    events = _events_of(spec, settings, facts, has_log=has_log)
    if recorder is not None and has_log:
        recorder.save_page = events.save_page
    return Run(
        spec=spec,
        launcher=launcher,
        datasets=_datasets_of(
            finder.datasets,
            lambda: settings._stored_positions(checkpoints) if checkpoints else {},
        ),
        listeners=(*([recorder] if recorder else []), *settings.listeners),
        label=label,
        block=RunBlock(lambda: label.name, _known(spec, tracking)),
        call_site=CallSite.of_caller(program.name),
        recorder=recorder,
        folder=_run_folder(checkpoints),
        resumption=lambda: _resumption(checkpoints, settings),
        events=events,
    )


def _events_of(
    spec: RunSpec, settings: TorchDistributor, where: Mapping[str, Any], *, has_log: bool
) -> RunEvents:
    """Return the events of a run, with what is known about it before its start."""
    given = {
        field.name: getattr(settings, field.name)
        for field in setting_fields(settings)
        if _is_given(settings, field)
    }
    if env := given.get("env"):
        given["env"] = sorted(env)  # the values may be secrets
    facts = {
        "run": spec.run_id,
        "name": printable(spec.program.name),
        "user": user_name(),
        "host": host_name(),
        "pid": os.getpid(),
        "step_times": settings.step_times,
        "settings": {
            name: value if isinstance(value, (int, float)) else shown(str(value))
            for name, value in given.items()
            if name != "listeners"
        },
        "versions": lambda: {"distributor": __version__, **software()},
        "where": dict(where),
        "logs": None if spec.logs is None else str(spec.logs.absolute()),
    }
    log = EventLog(spec.run_id, spec.logs, spec.env) if has_log else None
    return RunEvents(log, facts)


def _run_folder(settings: CheckpointSettings | None) -> AbstractContextManager[None]:
    """Remove the run's folder at the end if nothing was stored in it, unless it is elsewhere."""
    if settings is None or "://" in settings.storage_path:
        return nullcontext()
    return removed_if_empty(Path(settings.storage_path, settings.name))


def _resumption(stored: CheckpointSettings | None, settings: TorchDistributor) -> str | None:
    """Return from which checkpoint the run resumes."""
    if stored is None or (latest := settings._latest_checkpoint(stored)) is None:
        return None
    return (
        f"Resuming {stored.name} in {shown(stored.storage_path)}, whose latest checkpoint is "
        f"{latest}. Another name starts anew."
    )


def _known(spec: RunSpec, tracking: TrackedRun | Untracked) -> dict[str, str]:
    """Return what a run's block shows besides its state."""
    known = {"run": spec.run_id}
    if isinstance(tracking, TrackedRun):
        known["MLflow"] = tracking.link
    if spec.logs is not None:
        known["logs"] = str(spec.logs)
    return known


def _checkpoint_variables(settings: Settings, run_id: str) -> dict[str, str]:
    if settings.storage_path is None:
        return {}
    path = absolute(settings.storage_path)  # ranks may have another working folder
    return CheckpointSettings(storage_path=path, name=settings.name or run_id).to_variable()


def warm_up(distributor: TorchDistributor | None = None) -> None:
    """Start the warm process from which ranks of local runs are forked, before the first run.

    It imports torch in the background. The first run starts it otherwise, and waits.

    Parameters
    ----------
    distributor : TorchDistributor, optional
        The distributor whose runs follow: its ``env`` and ``preload`` determine what the process
        has. By default it is ``TorchDistributor(2)`` on CPUs.

    Raises
    ------
    ValueError
        If its ranks are not forked from a process on this machine: they run on executors, in an
        ``environment`` of their own, or without ``warm``.

    Examples
    --------
    >>> distributor.warm_up()
    """
    settings = distributor or TorchDistributor(num_processes=2, use_gpu=False)
    if not (settings.local_mode and settings.warm) or settings.environment:
        raise ValueError(
            "warm_up starts the warm process of local runs, and the ranks of this distributor are "
            f"not forked from it: local_mode is {settings.local_mode}, warm is {settings.warm}, "
            f"environment is {settings.environment!r}."
        )
    _, max_processes = check_num_processes("num_processes", settings.num_processes)
    prepare_zygote(max_processes, {**forwarded_env(settings), **settings.env}, settings.preload)


def _check_datasets(found: list[SparkDataset], train_object: Any, args: tuple[Any, ...]) -> None:
    """Check DataFrames before anything is launched."""
    if isinstance(train_object, (str, os.PathLike, Module)) and len(args) and found:
        raise TypeError(
            f"The arguments of a script are strings, but {found[0].name} is a DataFrame. Pass a "
            "function, or the path of files that Spark has written."
        )
    if found:
        require_spark()
    session = Session.active()
    for dataset in found:
        if session is None or not session.owns(dataset.frame):
            raise ValueError(
                f"The DataFrame {dataset.name} belongs to another Spark session than the active "
                "one, on which the ranks run: pass a DataFrame of the active session."
            )


def _datasets_of(
    found: list[SparkDataset], positions: Callable[[], Mapping[str, Any]]
) -> Datasets | None:
    """Return the datasets of a run, if it has any."""
    if not found:
        return None
    from distributor.launchers.spark import datasets  # which needs pyarrow

    return datasets.Datasets(found, positions)
