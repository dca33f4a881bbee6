"""Builds the job of one call of ``run``: program, plan, MLflow run and environment variables."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import Field, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from distributor.control.graceful_shutdown import interruptible
from distributor.control.run import Datasets, Launcher, Run
from distributor.core.cell_errors import ends_at_caller
from distributor.core.files import absolute, removed_if_empty, shown
from distributor.core.rank_variables import NAMED_SERVER, CheckpointSettings
from distributor.core.text import Redaction, printable, table_of
from distributor.core.versions import require_spark
from distributor.data.dataframes import DatasetFinder, SparkDataset
from distributor.launchers.local import LocalLauncher, prepare_zygote
from distributor.programs import program_of
from distributor.run_spec import (
    RunSpec,
    Settings,
    check_shown_ranks,
    forwarded_env,
    gpu_type_of,
    ignored_settings,
    new_run_id,
)
from distributor.screen.messages import RunLabel, warn, warn_once
from distributor.screen.run_block import RunBlock
from distributor.serialization.program import Module, Program
from distributor.settings.fields import AdminDefault, setting, setting_fields
from distributor.settings.types import RANKS, SWITCH, check_num_processes, option
from distributor.spark.plan import plan_cluster, plan_local
from distributor.spark.session import Session
from distributor.spark.spark_job import CallSite
from distributor.tracking.recorder import Recorder
from distributor.tracking.run import (
    TrackedRun,
    Untracked,
    describe_job,
    open_run,
    rank_environment,
)

CHECK_STORAGE = "distributor.train.runtime.session:check_storage"
"""What ranks call first if they store checkpoints, so that bad storage fails before training."""

LATEST_CHECKPOINT = "distributor.train.storage.checkpoint_store:latest_checkpoint"
LATEST_POSITIONS = "distributor.train.storage.checkpoint_store:latest_positions"
"""What reads the name of a run's latest checkpoint, and its positions of data loaders."""

FIRST_GROUP = "what most runs need"

NOT_TRACKED = "MLflow is off: this run has no MLflow run of its own. Return the metrics."


@dataclass(frozen=True, repr=False)
class PlannedSettings(Settings):
    """Settings together with the number and place of the ranks, which are planned here."""

    is_tracked: ClassVar[bool] = True
    """Whether a run is logged to MLflow, if MLflow is in use."""

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


def plan(settings: PlannedSettings, min_processes: int, max_processes: int) -> Planned:
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
        settings.barrier,
        gpu_sharing=settings.gpu_sharing,
    )
    kind = BarrierLauncher if cluster.barrier else GangLauncher
    return Planned(kind(session, cluster), max_processes, cluster.num_tasks)


@ends_at_caller
@interruptible
def prepare_run(
    settings: PlannedSettings,
    keep_all: bool,
    train_object: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    finder: DatasetFinder | None = None,
) -> Run:
    """Build the run of one call, without starting it.

    Parameters
    ----------
    settings : PlannedSettings
        The user's settings.
    keep_all : bool
        Whether the values of all ranks are wanted.
    train_object, args, kwargs
        The arguments of ``run``.
    finder : DatasetFinder, optional
        Has the datasets that ranks get without being passed them as arguments.
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
        tracking = open_run(
            printable(program.name),
            describe_job(run_id, facts),
            launcher.shares_disk,
            lambda: program.mentions(b"mlflow"),
        )
    env = {**rank_environment(tracking, settings.mlflow_ranks), **env}
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
    )


def _run_folder(settings: CheckpointSettings | None) -> AbstractContextManager[None]:
    """Remove the run's folder at the end if nothing was stored in it, unless it is elsewhere."""
    if settings is None or "://" in settings.storage_path:
        return nullcontext()
    return removed_if_empty(Path(settings.storage_path, settings.name))


def _resumption(stored: CheckpointSettings | None, settings: PlannedSettings) -> str | None:
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


def warm_up(distributor: PlannedSettings | None = None) -> None:
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
    settings = distributor or PlannedSettings(num_processes=2, use_gpu=False)
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
