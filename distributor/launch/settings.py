"""The settings of a run, each described once: type, default, documentation and check.

The docstrings of `TorchDistributor` and ``@distributed`` and the options of the command line are
made from these descriptions.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from distributor.core.addresses import checked_port, port_range, split_address
from distributor.core.checkpoint_config import check_name
from distributor.core.gpus import GPUType
from distributor.core.paths import local_path
from distributor.core.spelling import Spelling
from distributor.launch import setting_checks as checks
from distributor.launch.defaults import NOT_GIVEN, complete, folder
from distributor.launch.run_listener import Listener
from distributor.launch.setting_descriptions import documented, setting
from distributor.launch.spark.environments import Environment, check_environment
from distributor.launch.spark.user_modules import check_py_modules
from distributor.node.agent.worker_env import RANK_VARIABLES


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
        "mapping of str to str",
        "Environment variables of every rank.",
        checks.check_env,
    )
    forward_env: Sequence[str] = setting(
        (),
        "sequence of str",
        """Environment variables of this process that every rank gets too, by name or pattern,
        such as ``["HF_*"]``. Those of `env` take precedence.""",
        checks.check_strings("variables, such as ['HF_*']"),
    )
    timeout: float | None = setting(
        None,
        "float",
        """Seconds that an attempt may take once its ranks have started. Without it there is no
        limit.""",
        checks.check_timeout,
    )
    start_timeout: float = setting(
        600.0,
        "float",
        "Seconds until all ranks must have started, including the wait for free slots.",
        checks.check_start_timeout,
    )
    stall_warning: float | None = setting(
        300.0,
        "float or None",
        """Seconds in which no rank prints, reports, or uses its CPU or GPU, after which a warning
        shows where each rank is, with its stack. None for no warning. On Linux only.""",
        checks.check_timeout,
    )
    stall_timeout: float | None = setting(
        None,
        "float",
        """Seconds of such inactivity after which the attempt fails with `RunStalled`. By default
        there is no limit.""",
        checks.check_timeout,
    )
    log_dir: str | os.PathLike[str] | None = setting(
        NOT_GIVEN,
        "str or path",
        """Folder on the driver for the complete output of every rank, in files such as
        ``<log_dir>/<run id>/attempt_0/rank3.stderr``. A node that cannot connect to the driver
        writes its ranks' files there on its own disk.""",
        folder,
    )
    show_output: Literal["all", "none"] | Collection[int] = setting(
        "all",
        '"all", "none" or collection of int',
        "The ranks whose output is shown by this process as it arrives.",
        checks.check_shown_ranks,
    )
    hub_address: str | None = setting(
        None,
        "str",
        """Address at which this process listens for the nodes: ``host``, ``host:port``,
        ``[IPv6]`` or ``[IPv6]:port``. By default it is the address of Spark's driver.""",
        lambda name, value: None if value is None else split_address(name, value),
    )
    hub_port: int = setting(
        NOT_GIVEN,
        "int",
        """Port at which this process listens for the nodes, unless `hub_address` has one; 0 for
        any free port. All runs of this process share it.""",
        checked_port,
    )
    rank_ports: str | None = setting(
        NOT_GIVEN,
        "str",
        """Ports for rank 0's rendezvous store, such as ``"29500-29599"``. Each run takes one, and
        another on each executor that passes on large arguments to others.""",
        port_range,
    )
    warm: bool = setting(
        NOT_GIVEN,
        "bool",
        """Whether ranks are forked from a warm process, the zygote, which has imported torch and
        which each node keeps for later runs. Otherwise, and always on macOS, each rank starts a
        new interpreter.""",
        checks.check_bool,
    )
    preload: Sequence[str] = setting(
        (),
        "sequence of str",
        """Modules that the zygote imports besides torch. They must not use CUDA or start
        threads when they are imported.""",
        checks.check_strings("modules, such as ['lightning']"),
    )
    gpu_type: GPUType | str | None = setting(
        None,
        "GPUType or str",
        """Required type of the GPUs, such as "H100", in upper or lower case. By default any type
        is accepted.""",
        checks.check_gpu_type,
    )
    pool: str | None = setting(
        None,
        "str",
        """Pool of Spark's fair scheduler for the job. By default it is the pool that the calling
        thread has set.""",
        checks.check_pool,
    )
    mlflow_ranks: str = setting(
        "first",
        '"first" or "all"',
        """Ranks that log to the job's MLflow run: rank 0 or all. MLflow calls of other ranks do
        nothing.""",
        checks.check_mlflow_ranks,
    )
    storage_path: str | os.PathLike[str] | None = setting(
        None,
        "str or path",
        """Path that all nodes can access, or URI such as ``s3://bucket/runs``, for the checkpoints
        of ``distributor.train.report``.""",
        checks.check_storage_path,
    )
    name: str | None = setting(
        None,
        "str",
        """Name of the run's folder in `storage_path`. A run with the name of an earlier one
        resumes from its latest checkpoint. By default it is the run id.""",
        lambda name, value: None if value is None else check_name(name, value),
    )
    max_failures: int = setting(
        0,
        "int",
        """Number of attempts that may fail, because a rank raises an exception or a rank,
        executor or host dies, before the run fails. The ranks of the next attempt get the latest
        checkpoint from ``distributor.train.get_checkpoint``. -1 is no limit. An exception that
        repeats at the same step counts like any other, with a warning.""",
        checks.check_max_failures,
    )
    max_preemption_failures: int | None = setting(
        None,
        "int",
        """Number of attempts that may fail because a rank or executor dies after a preemption
        notice; -1 for no limit. By default they count among those of `max_failures`.""",
        checks.check_max_preemption_failures,
    )
    environment: Environment = setting(
        None,
        "path or sequence of str",
        """Python environment of the ranks: a virtual environment packed by venv-pack or
        conda-pack, or a list of requirements that pip installs once on each node. By default
        ranks run in the Python of the driver or of the executors.""",
        lambda name, value: check_environment(value),
    )
    py_modules: Sequence[str | os.PathLike[str]] = setting(
        (),
        "sequence of str or path",
        """Modules and packages by name, and files and folders by path, that ranks can import in
        addition to the modules that the program imports by a statement. Plug-ins that are
        imported by a computed name need it.""",
        lambda name, value: check_py_modules(value),
    )
    listeners: Sequence[Listener] = setting(
        (),
        "Listener or sequence of Listener",
        "Objects that follow the run in this process: output, progress, reports and failures.",
        checks.check_listeners,
    )

    def __post_init__(self) -> None:
        complete(self)
        if isinstance(self.listeners, Listener):
            object.__setattr__(self, "listeners", (self.listeners,))
        for name in ("log_dir", "environment"):
            path = _checked_path(self.spelling.of(name), getattr(self, name))
            object.__setattr__(self, name, path)
        if isinstance(self.py_modules, (list, tuple)):
            name = self.spelling.of("py_modules")
            modules = type(self.py_modules)(_checked_path(name, each) for each in self.py_modules)
            object.__setattr__(self, "py_modules", modules)
        for field in dataclasses.fields(self):
            field.metadata["check"](self.spelling.of(field.name), getattr(self, field.name))
        if self.name is not None and self.storage_path is None:
            name, path = self.spelling.of("name"), self.spelling.of("storage_path")
            raise ValueError(
                f"{name} is {self.name!r}, but {path} is not set: {name} is a folder in it."
            )


def _checked_path(name: str, value: Any) -> Any:
    """Check a path, and replace what depends on this machine, as ``~`` does; nodes may differ."""
    if not isinstance(value, (str, os.PathLike)):
        return value
    path = local_path(value, name)
    return path if os.fspath(value).startswith(("~", "file:")) else value


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
    return None if settings.gpu_type is None else GPUType(settings.gpu_type.upper()).value
