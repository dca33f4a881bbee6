"""Configuration of a training run as a whole, and its callbacks, under Ray Train's names."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import ModuleType
from typing import Any, ClassVar

from distributor.core.checkpoint_config import check_name
from distributor.core.spelling import checks_keywords
from distributor.launch.job import new_run_id
from distributor.launch.setting_types import check_env, check_storage_path
from distributor.train.checkpoint import Checkpoint
from distributor.train.config import (
    CheckpointConfig,
    ChecksUnsupported,
    FailureConfig,
    InvalidArgument,
    LoggingConfig,
)
from distributor.train.data_config import DataConfig
from distributor.train.runtime.process_group import BackendConfig, TorchConfig
from distributor.train.scaling_config import ScalingConfig

_RUNTIME_ENV = {"env_vars": "env", "pip": "environment", "py_modules": "py_modules"}
"""The keys of Ray's runtime environments, and the settings that they determine."""
_ENVIRONMENT = "Pass a packed environment as settings={'environment': 'environment.tar.gz'}."
DEFAULT_STORAGE_PATH = "~/distributor_results"
"""The default storage path if all ranks are on this machine."""


def _default_path() -> str:
    return os.path.expanduser(DEFAULT_STORAGE_PATH)


@checks_keywords
@dataclass
class RunConfig(ChecksUnsupported):
    """The storage of a training run, and its handling of failures.

    Follows ``ray.train.RunConfig``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.RunConfig.html

    Parameters
    ----------
    name : str, optional
        The run's name, which is its folder in `storage_path`; by default a new one. A run with the
        name of an earlier run resumes from its latest checkpoint.
    storage_path : str or path, optional
        A folder that all nodes mount, or an address such as ``s3://bucket/runs``; by default
        ``~/distributor_results``, which must then be on one machine with all ranks.
    storage_filesystem : pyarrow.fs.FileSystem or fsspec file system, optional
        The file system of `storage_path`, also of the default one; by default the one that the path
        names.
    failure_config : FailureConfig, optional
        How often the run is restarted; by default never.
    checkpoint_config : CheckpointConfig, optional
        Which checkpoints are kept; by default all.
    callbacks : UserCallback or sequence of UserCallback, optional
        Objects that are called on the driver after each report and each failed attempt.
    worker_runtime_env : mapping of str to object, optional
        The environment of the ranks, by Ray's keys: ``env_vars``, a dict of environment variables;
        ``pip``, a list of requirements; ``py_modules``, a list of modules, or of their names or
        paths. They are added to the settings ``env``, ``environment`` and ``py_modules``.
    logging_config : LoggingConfig, optional
        Which messages about the run are shown on the driver; by default all.
    sync_config, verbose, stop, progress_reporter, log_to_file
        Not supported, as in Ray Train.
    settings : mapping of str to object, optional
        Further parameters of `TorchDistributor`: timeout, log_dir, env, environment and so on.

    Raises
    ------
    TypeError
        If a configuration or a callback is of another class.
    ValueError
        If a parameter is not supported.

    Examples
    --------
    >>> run_config = RunConfig(name="mnist", storage_path="s3://bucket/runs")
    """

    # None in these is replaced when the object is made.
    name: str = None  # type: ignore[assignment]
    storage_path: str | os.PathLike[str] = None  # type: ignore[assignment]
    storage_filesystem: Any = None
    failure_config: FailureConfig = None  # type: ignore[assignment]
    checkpoint_config: CheckpointConfig = None  # type: ignore[assignment]
    callbacks: Sequence[UserCallback] = None  # type: ignore[assignment]
    worker_runtime_env: Mapping[str, Any] = None  # type: ignore[assignment]
    logging_config: LoggingConfig = None  # type: ignore[assignment]
    sync_config: Any = None
    verbose: Any = None
    stop: Any = None
    progress_reporter: Any = None
    log_to_file: Any = None
    _: KW_ONLY
    settings: Mapping[str, Any] = field(default_factory=dict)

    unsupported: ClassVar[Mapping[str, str]] = {
        "sync_config": "Each report uploads its checkpoint to storage.",
        "verbose": "Pass settings={'show_output': ...}.",
        "stop": "Return from the training function.",
        "progress_reporter": "Call distributor.runtime.progress in the training function.",
        "log_to_file": "Pass settings={'log_dir': ...}.",
    }

    def __post_init__(self) -> None:
        self.name = self.name or new_run_id()
        self._had_no_path = not self.storage_path
        check_storage_path("storage_path", self.storage_path)
        self.storage_path = os.fspath(self.storage_path or _default_path())
        self.failure_config = self.failure_config or FailureConfig()
        self.checkpoint_config = self.checkpoint_config or CheckpointConfig()
        self.logging_config = self.logging_config or LoggingConfig()
        self.worker_runtime_env = self.worker_runtime_env or {}
        if isinstance(self.callbacks, UserCallback):
            self.callbacks = [self.callbacks]
        self.callbacks = self.callbacks or []
        self.check()

    @property
    def uses_default_path(self) -> bool:
        """Whether `storage_path` was not chosen by the user."""
        return self._had_no_path and self.storage_path == _default_path()

    def check(self) -> None:
        """Check all fields; raises what the class documents."""
        self._check_unsupported()
        check_name("RunConfig.name", self.name)
        for name, kind in (
            ("failure_config", FailureConfig),
            ("checkpoint_config", CheckpointConfig),
            ("logging_config", LoggingConfig),
            ("worker_runtime_env", Mapping),
            ("settings", Mapping),
        ):
            if not isinstance(value := getattr(self, name), kind):
                raise InvalidArgument(f"{name} must be a {kind.__name__}, but is {value!r}.")
        self.failure_config.check()
        self.checkpoint_config.check()
        self.logging_config.check()
        check_storage_path("storage_path", self.storage_path)
        check_env("RunConfig.settings['env']", self.settings.get("env", {}))
        self._check_runtime_env()
        callbacks = self.callbacks
        if not isinstance(callbacks, Sequence) or not all(
            isinstance(callback, UserCallback) for callback in callbacks
        ):
            raise InvalidArgument(f"callbacks must be UserCallback objects, but are {callbacks!r}.")

    def _check_runtime_env(self) -> None:
        for key, value in self.worker_runtime_env.items():
            if key not in _RUNTIME_ENV and value:
                instead = f"It takes {', '.join(_RUNTIME_ENV)}. {_ENVIRONMENT}"
                self._refuse(f"worker_runtime_env[{key!r}]", value, instead)
        if isinstance(pip := self.worker_runtime_env.get("pip"), (str, Mapping)):
            self._refuse("worker_runtime_env['pip']", pip, "Pass a list of requirements.")
        check_env("worker_runtime_env['env_vars']", self.worker_runtime_env.get("env_vars") or {})
        modules = self.worker_runtime_env.get("py_modules") or []
        if isinstance(modules, str) or not isinstance(modules, Sequence):
            raise InvalidArgument(
                "worker_runtime_env['py_modules'] must be a list of modules, or of their names or "
                f"paths, but is {modules!r}."
            )

    def all_settings(self) -> dict[str, Any]:
        """Return `settings` together with those of `worker_runtime_env`.

        Raises
        ------
        ValueError
            If both determine the same.
        """
        given = {
            _RUNTIME_ENV[key]: value for key, value in self.worker_runtime_env.items() if value
        }
        if "py_modules" in given:
            given["py_modules"] = [
                each.__name__ if isinstance(each, ModuleType) else each
                for each in given["py_modules"]
            ]
        settings = dict(self.settings)
        env = {**given.pop("env", {}), **settings.pop("env", {})}
        if twice := sorted(given.keys() & settings.keys()):
            raise ValueError(
                f"RunConfig.worker_runtime_env and RunConfig.settings both determine {twice}."
            )
        return {**given, **settings, "env": env}


@dataclass(frozen=True)
class TrainRunContext:
    """The configuration of a training run, for callbacks.

    Follows ``ray.train.v2.api.context.TrainRunContext``, the first argument of the methods of
    ``ray.train.UserCallback``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.UserCallback.html

    Parameters
    ----------
    run_config : RunConfig
        The one of `TorchTrainer`.
    train_loop_config : mapping of str to object, optional
        The one that was passed to `TorchTrainer`.
    scaling_config : ScalingConfig
        The one of `TorchTrainer`.
    backend_config : BackendConfig
        The ``torch_config`` of `TorchTrainer`.
    dataset_config : DataConfig
        The one of `TorchTrainer`.

    Attributes
    ----------
    run_id : str
        An id of the trainer.

    Examples
    --------
    >>> class PrintName(UserCallback):
    ...     def after_report(self, run_context, metrics, checkpoint):
    ...         print(run_context.run_config.name)
    """

    run_id: str = field(init=False, default_factory=lambda: uuid.uuid4().hex)
    run_config: RunConfig
    train_loop_config: Mapping[str, Any] | None = None
    scaling_config: ScalingConfig = field(default_factory=ScalingConfig)
    backend_config: BackendConfig = field(default_factory=TorchConfig)
    dataset_config: DataConfig = field(default_factory=DataConfig)

    def get_run_config(self) -> RunConfig:
        """Return ``run_config``."""
        return self.run_config


class UserCallback:
    """A base class for callbacks on the driver; its methods do nothing.

    The methods are called one at a time, on the thread that waits for the run, while the ranks
    continue. They receive their arguments by keyword. If one raises an exception, the run ends
    with a `ControllerError`.

    Follows ``ray.train.UserCallback``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.UserCallback.html

    Examples
    --------
    >>> class PrintLoss(UserCallback):
    ...     def after_report(self, run_context, metrics, checkpoint):
    ...         print([each["loss"] for each in metrics])
    >>> run_config = RunConfig(callbacks=[PrintLoss()])
    """

    def after_report(
        self,
        run_context: TrainRunContext,
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Handle a report of all ranks.

        Parameters
        ----------
        run_context : TrainRunContext
            The configuration of the run.
        metrics : list of dict of str to object
            The metrics of each rank, in rank order.
        checkpoint : Checkpoint or None
            The checkpoint, which now exists; None if none was reported.
        """

    def after_exception(
        self, run_context: TrainRunContext, worker_exceptions: dict[int, Exception]
    ) -> None:
        """Handle the failure of an attempt; another attempt may follow.

        Parameters
        ----------
        run_context : TrainRunContext
            The configuration of the run.
        worker_exceptions : dict of int to Exception
            The exceptions by rank, the root cause first. If no rank failed itself, for example
            because a node was lost or a deadline passed, the exception is under rank 0.
        """
