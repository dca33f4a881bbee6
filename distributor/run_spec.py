"""The settings of a run, each declared once: its default, type and description.

The checks, the docstrings of `TorchDistributor` and ``@distributed``, and the options of the
command line follow from the declarations.
"""

from __future__ import annotations

import fnmatch
import os
import secrets
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from distributor import settings as types
from distributor.core.gpus import GPUType
from distributor.core.spelling import Spelling
from distributor.core.text import listed
from distributor.node.agent.worker_env import RANK_VARIABLES
from distributor.programs import Environment, check_environment
from distributor.serialization.program import Program
from distributor.settings import (
    AdminDefault,
    Listener,
    complete,
    documented,
    option,
    setting,
    setting_fields,
)
from distributor.spark.session import check_executor_resources
from distributor.spark.user_modules import check_py_modules

_SECONDS_OR_OFF = replace(
    types.SECONDS_IF_ANY.with_options(
        *types.SECONDS.options,
        option("--no-{}", action="store_const", const=None, help="never show this warning"),
    ),
    shown="float or None",
)
_ENVIRONMENT = types.SettingType(
    "path or sequence of str",
    lambda name, value: check_environment(value),
    (
        option(metavar="ARCHIVE", help="a packed virtual environment for the ranks"),
        option(
            "--requirement",
            action="append",
            metavar="NAME==VERSION",
            help="a requirement that uv or pip installs for the ranks, once on each node; may be "
            "repeated",
        ),
    ),
    convert=types.checked_path,
)
_EXECUTOR_RESOURCES = types.SettingType(
    "mapping of str to str or int",
    check_executor_resources,
    (
        option(
            "--executor-resource",
            type=types.read_pair,
            action="append",
            metavar="PROPERTY=VALUE",
            help="a Spark property of executors that Spark starts for the run; may be repeated",
        ),
    ),
)
_PY_MODULES = types.SettingType(
    "sequence of str or path",
    lambda name, value: check_py_modules(value),
    (
        types.several(
            "a module or package by name, or a file or folder by path, that ranks can import in "
            "addition to those that the program imports by a statement"
        ),
    ),
    convert=lambda name, value: (
        type(value)(types.checked_path(name, each) for each in value)
        if isinstance(value, (list, tuple))
        else value
    ),
)


@documented()
@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is launched and watched; checked on construction.

    Parameters
    ----------
    {settings}

    Raises
    ------
    TypeError, ValueError, OSError
        If a setting is invalid. The message names the setting and its value.
    """

    spelling: ClassVar[Spelling] = Spelling()

    env: Mapping[str, str] = setting(
        {},
        types.ENV,
        "Environment variables of every rank.",
        group="environment",
    )
    forward_env: Sequence[str] = setting(
        (),
        types.strings(
            "variables, such as ['HF_*']",
            "a variable of this process that every rank gets too, by name or pattern such as "
            "'HF_*'",
        ),
        """Environment variables of this process that every rank gets too, by name or pattern,
        such as ``["HF_*"]``. Those of `env` take precedence.""",
        group="environment",
    )
    timeout: float | None = setting(
        None,
        types.SECONDS_IF_ANY,
        """Seconds that an attempt may take once its ranks have started. Without it there is no
        limit.""",
        group="failures",
        reaches_ranks=True,
    )
    start_timeout: float = setting(
        600.0,
        types.SECONDS,
        "Seconds until all ranks must have started, including the wait for free slots.",
        group="failures",
        reaches_ranks=True,
    )
    stall_warning: float | None = setting(
        300.0,
        _SECONDS_OR_OFF,
        """Seconds in which no rank prints, reports, or uses its CPU or GPU, after which a warning
        shows where each rank is, with its stack. None for no warning. On Linux only.""",
        group="output",
    )
    stall_timeout: float | None = setting(
        None,
        types.SECONDS_IF_ANY,
        """Seconds in which no rank prints, reports, or uses its CPU or GPU, after which the
        attempt fails. The error is `RunStalled`. By default there is no limit.""",
        group="failures",
    )
    log_dir: str | os.PathLike[str] | None = setting(
        AdminDefault("DISTRIBUTOR_LOG_DIR", "spark.distributor.logDir", None, "none"),
        types.FOLDER,
        """Folder on the driver for the complete output of every rank, in files such as
        ``<log_dir>/<run id>/attempt_0/rank3.stderr``. A node that cannot connect to the driver
        writes its ranks' files there on its own disk. Progress bars are in them as the ranks drew
        them, with every update.""",
        group="output",
    )
    event_log: bool = setting(
        AdminDefault("DISTRIBUTOR_EVENT_LOG", "spark.distributor.eventLog", True, "True"),
        types.SWITCH,
        """Whether the driver writes an event log of the run, which ``distributor report`` shows:
        in `log_dir`, or else in ``$XDG_STATE_HOME/distributor/runs`` (``~/.local/state``), which
        has the latest 200 runs of this user, and 500 MB.""",
        group="output",
    )
    show_output: Literal["all", "none"] | Collection[int] = setting(
        "all",
        types.SHOWN_RANKS,
        """The ranks whose output is shown by this process as it arrives. A progress bar, such as
        tqdm's, moves on a terminal and in a notebook; in a file or a pipe it has a line a minute at
        most, and its final state.""",
        group="output",
    )
    hub_address: str | None = setting(
        None,
        types.HOST,
        """Address at which this process listens for the nodes: ``host``, ``host:port``,
        ``[IPv6]`` or ``[IPv6]:port``. By default it is the address of Spark's driver.""",
        group="cluster",
    )
    hub_port: int = setting(
        AdminDefault("DISTRIBUTOR_HUB_PORT", "spark.distributor.hub.port", 0, "any free port"),
        types.PORT,
        """Port at which this process listens for the nodes, unless `hub_address` has one; 0 for
        any free port. All runs of this process share it.""",
        group="cluster",
    )
    rank_ports: str | None = setting(
        AdminDefault(
            "DISTRIBUTOR_RANK_PORTS", "spark.distributor.rank.ports", None, "any free port"
        ),
        types.PORTS,
        """Ports for rank 0's rendezvous store, such as ``"29500-29599"``. Each run takes one.""",
        group="cluster",
    )
    warm: bool = setting(
        AdminDefault("DISTRIBUTOR_WARM", "spark.distributor.warm", True, "True"),
        types.SWITCH,
        """Whether ranks are forked from a warm process, the zygote, which has imported torch and
        which each node keeps for later runs. Otherwise, and always on macOS, each rank starts a
        new interpreter.""",
        group="ranks",
        reaches_ranks=True,
    )
    preload: Sequence[str] = setting(
        (),
        types.strings(
            "modules, such as ['lightning']",
            "a module that the warm process imports besides torch",
        ),
        """Modules that the zygote imports besides torch. They must not use CUDA or start
        threads when they are imported.""",
        group="ranks",
        reaches_ranks=True,
    )
    step_times: bool = setting(
        True,
        types.SWITCH,
        """Whether ranks count the steps of their optimizers, and what they wait for between them.
        Without, a run has no verdict about its speed.""",
        group="ranks",
        reaches_ranks=True,
    )
    numa_binding: bool = setting(
        False,
        types.SWITCH,
        """Whether each rank runs on the CPUs of its GPU's NUMA node only or, without GPUs, of its
        share of the machine's nodes, as with torchrun's ``--numa-binding=node``. Its DataLoader
        workers do too. On Linux only.""",
        group="ranks",
        reaches_ranks=True,
    )
    gpu_type: GPUType | str | None = setting(
        None,
        types.GPU_TYPE,
        """Required type of the GPUs, such as "H100", in upper or lower case. By default any type
        is accepted.""",
        group="ranks",
    )
    gpu_sharing: bool = setting(
        False,
        types.SWITCH,
        """Whether ranks share GPUs where ``spark.task.resource.gpu.amount`` is below one, as for
        the tasks of RAPIDS. By default each rank has a whole GPU: the run's tasks then have a
        resource profile of their own (PySpark 4), and other jobs keep their fractions.""",
        group="cluster",
    )
    pool: str | None = setting(
        None,
        types.POOL,
        """Pool of Spark's fair scheduler for the job. By default it is the pool that the calling
        thread has set.""",
        group="cluster",
    )
    barrier: bool | None = setting(
        None,
        types.SWITCH_IF_ANY,
        """Whether ranks on executors run in a barrier stage, whose tasks Spark starts together and
        which dynamic allocation excludes. If False, they run in the tasks of an ordinary job,
        which may come and go. By default they do so where dynamic allocation is on.""",
        group="cluster",
    )
    executor_resources: Mapping[str, str | int] | None = setting(
        None,
        _EXECUTOR_RESOURCES,
        """Resources of executors that Spark starts for the run and ends after it, with dynamic
        allocation: Spark properties, such as ``{"spark.executor.cores": 4,
        "spark.executor.resource.gpu.amount": 1}``. Others are those of the session. By default the
        run uses the session's executors.""",
        group="cluster",
    )
    mlflow_ranks: str = setting(
        "first",
        types.one_of("first", "all"),
        """Ranks that log to the job's MLflow run: rank 0 or all. MLflow calls of other ranks do
        nothing.""",
        group="tracking",
    )
    storage_path: str | os.PathLike[str] | None = setting(
        None,
        types.STORAGE,
        """Path that all nodes can access, or URI such as ``s3://bucket/runs``, for the checkpoints
        of ``distributor.train.report``.""",
        group="failures",
    )
    name: str | None = setting(
        None,
        types.FOLDER_NAME,
        """Name of the run's folder in `storage_path`. A run with the name of an earlier one
        resumes from its latest checkpoint. By default it is the run id.""",
        group="failures",
    )
    max_failures: int = setting(
        0,
        types.FAILURES,
        """Number of attempts that may fail, because a rank raises an exception or a rank,
        executor or host dies, before the run fails. The ranks of the next attempt get the latest
        checkpoint from ``distributor.train.get_checkpoint``. -1 is no limit. An exception that
        repeats at the same step counts like any other, with a warning.""",
        group="failures",
    )
    recovery: Literal["restart", "in_place"] = setting(
        "restart",
        types.one_of("restart", "in_place"),
        """What follows the loss of a rank. "restart" starts all ranks again, from the latest
        checkpoint. "in_place" has the others go on in their processes, without losing a step, and
        starts a process in the place of the lost one; if that is not possible, all restart.""",
        group="failures",
        reaches_ranks=True,
    )
    max_preemption_failures: int | None = setting(
        None,
        types.FAILURES_IF_ANY,
        """Number of attempts that may fail because a rank or executor dies after a preemption
        notice; -1 for no limit. By default they count among those of `max_failures`.""",
        group="failures",
    )
    environment: Environment = setting(
        None,
        _ENVIRONMENT,
        """Python environment of the ranks: a virtual environment packed by venv-pack or
        conda-pack, or a list of requirements that uv or pip installs once on each node. By default
        ranks run in the Python of the driver or of the executors.""",
        group="environment",
    )
    py_modules: Sequence[str | os.PathLike[str]] = setting(
        (),
        _PY_MODULES,
        """Modules and packages by name, and files and folders by path, that ranks can import in
        addition to the modules that the program imports by a statement. Plug-ins that are
        imported by a computed name need it.""",
        group="environment",
    )
    listeners: Sequence[Listener] = setting(
        (),
        types.LISTENERS,
        "Objects that follow the run in this process: output, progress, reports and failures.",
    )

    @property
    def _resize_interval(self) -> float:
        """Seconds of an attempt until it may restart with more ranks at a checkpoint."""
        return 0.0

    def __post_init__(self) -> None:
        complete(self)
        for each in setting_fields(self):
            kind, name = each.metadata["type"], self.spelling.of(each.name)
            value = kind.convert(name, getattr(self, each.name))
            kind.check(name, value)
            object.__setattr__(self, each.name, value)
        if self.name is not None and self.storage_path is None:
            name, path = self.spelling.of("name"), self.spelling.of("storage_path")
            raise ValueError(
                f"{name} is {self.name!r}, but {path} is not set: {name} is a folder in it."
            )


def check_shown_ranks(settings: Settings, max_processes: int) -> None:
    """Check that the ranks whose output is to be shown exist.

    Parameters
    ----------
    settings : Settings
        Has them, and how the user calls settings.
    max_processes : int
        The number of ranks at most.
    """
    shown = settings.show_output
    if not isinstance(shown, str) and (beyond := [rank for rank in shown if rank >= max_processes]):
        name, number = (settings.spelling.of(each) for each in ("show_output", "num_processes"))
        raise ValueError(
            f"{name} has {listed('rank', beyond)}, but {number} is {max_processes}: ranks have the "
            f"numbers from 0 to {max_processes - 1}."
        )


def check_recovery(settings: Settings, max_processes: int) -> None:
    """Check that survivors of a lost rank can go on, if they are to.

    Parameters
    ----------
    settings : Settings
        Has ``recovery``, and how the user calls settings.
    max_processes : int
        The number of ranks at most.
    """
    if settings.recovery != "in_place":
        return
    name, most, number, barrier = (
        settings.spelling.of(each)
        for each in ("recovery", "max_failures", "num_processes", "barrier")
    )
    if settings.max_failures == 0:
        problem = f"{most} is 0, so the first failure ends the run: set {most} to how many may fail"
    elif max_processes == 1:
        problem = f"{number} is 1: there is no rank that could go on"
    elif settings.barrier:
        problem = (
            f"{barrier} is True, and Spark ends a barrier stage with one of its executors: leave "
            f"{barrier} unset"
        )
    else:
        return
    raise ValueError(f"{name} is 'in_place', but {problem}.")


_IGNORED: list[tuple[tuple[str, ...], Callable[[Any], bool], str]] = [
    (
        ("gpu_sharing", "pool", "barrier", "hub_address", "hub_port"),
        lambda settings: settings.local_mode,
        "the ranks run on this machine, without Spark",
    ),
    (
        ("numa_binding",),
        lambda settings: settings.local_mode and sys.platform != "linux",
        "only Linux binds processes to CPUs",
    ),
    (("gpu_type",), lambda settings: not settings.use_gpu, "the ranks have no GPUs"),
    (
        ("preload",),
        lambda settings: not settings.warm,
        "each rank starts a new interpreter (warm is off)",
    ),
]
"""Settings, when they have no effect, and why."""


def ignored_settings(settings: Any, given: Collection[str]) -> list[str]:
    """Return a message for each group of given settings that the others make meaningless."""
    groups = (
        ([settings.spelling.of(name) for name in names if name in given], reason)
        for names, is_ignored, reason in _IGNORED
        if is_ignored(settings)
    )
    return [
        f"{' and '.join(names)} {'has' if len(names) == 1 else 'have'} no effect: {reason}."
        for names, reason in groups
        if names
    ]


def forwarded_env(settings: Settings) -> dict[str, str]:
    """Return the variables of this process that ``forward_env`` selects, without a rank's own."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in RANK_VARIABLES
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in settings.forward_env)
    }


def gpu_type_of(settings: Settings) -> str | None:
    """Return the required type of the GPUs in capitals; None for any."""
    return None if settings.gpu_type is None else GPUType(settings.gpu_type).value


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What a user wants of a run.

    Parameters
    ----------
    program : Program
        What each rank runs.
    num_processes : int
        The maximum number of ranks.
    min_processes : int
        The minimum, if there is no room for more.
    settings : Settings
        The user's settings.
    env : mapping of str to str
        Environment variables of every rank: the user's, and the run's own.
    keep_all : bool
        Whether the values of all ranks are returned, and not only rank 0's.
    run_id : str
        The run's id.
    """

    program: Program
    num_processes: int
    min_processes: int
    settings: Settings
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    keep_all: bool = False
    run_id: str = field(default_factory=lambda: new_run_id())

    @property
    def logs(self) -> Path | None:
        """The folder of the run's output, if it is stored."""
        log_dir = self.settings.log_dir
        return Path(log_dir) / self.run_id if log_dir else None


def new_run_id() -> str:
    """Return a unique run id."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
