"""Configuration of training runs, and callbacks, under Ray Train's names."""

# The parameters are checked when an object is created. Fields can be set afterwards, and are
# checked again when the training starts.

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from types import ModuleType
from typing import Any, ClassVar, Literal

from distributor.core.rank_variables import DEFAULT_STORAGE_PATH, check_name
from distributor.core.spelling import checks_keywords, suggestion
from distributor.data.dataframes import SparkDataset, is_dataframe
from distributor.run_spec import new_run_id
from distributor.screen.messages import warn_once
from distributor.settings import (
    any_of,
    check_bool,
    check_env,
    check_gpu_type,
    check_max_failures,
    check_num_processes,
    check_storage_path,
    in_,
    instance_of,
    items,
    must_be,
    number_of,
    optional,
)
from distributor.train.storage.checkpoint import Checkpoint

LEVELS = ("CRITICAL", "DEBUG", "ERROR", "FATAL", "INFO", "NOTSET", "WARN", "WARNING")
_TASK_RESOURCES = (
    "Set the resources of a task for the cluster: spark.task.cpus, spark.task.resource.gpu.amount."
)
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_GPU_TYPES = {"A10G": "A10"}  # that Ray names differently
_RUNTIME_ENV = {"env_vars": "env", "pip": "environment", "py_modules": "py_modules"}
"""The keys of Ray's runtime environments, and the settings that they determine."""
_ENVIRONMENT = "Pass a packed environment as settings={'environment': 'environment.tar.gz'}."


class InvalidArgument(TypeError, ValueError):
    """An argument has the wrong type, for which Ray raises ValueError."""


class UnsupportedParameter(DeprecationWarning, ValueError):
    """A parameter of Ray's class has a value that cannot be honoured on Spark.

    It is a DeprecationWarning too, because Ray raises that for the parameters that it no longer
    supports itself.
    """


def check_instance(name: str, value: object, kind: type) -> None:
    must_be(f"a {kind.__name__}", instance_of(kind), InvalidArgument)(name, value)


check_order = must_be("'max' or 'min'", in_("max", "min"))


def _check_interval(name: str, seconds: Any) -> None:
    must_be("a number of seconds", number_of(int, float), InvalidArgument)(name, seconds)
    if seconds < 0:
        raise ValueError(f"{name} is negative: {seconds}.")


class ChecksUnsupported:
    """A configuration that rejects parameters of Ray's class that have no meaning on Spark."""

    unsupported: ClassVar[Mapping[str, str]] = {}
    """By parameter, what to do instead. None, False and what is empty change nothing."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check all fields; raises what the class documents."""
        for name, instead in self.unsupported.items():
            if value := getattr(self, name):
                self._refuse(name, value, instead)

    def _refuse(self, name: str, value: object, instead: str) -> None:
        raise UnsupportedParameter(
            f"{type(self).__name__}: {name} is {value!r}, which is not supported on Spark. "
            f"{instead}"
        )


@checks_keywords
@dataclass
class ScalingConfig(ChecksUnsupported):
    """The number of ranks, and the machines that they run on.

    Follows ``ray.train.ScalingConfig``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.ScalingConfig.html

    Parameters
    ----------
    trainer_resources : dict, optional
        Not supported: the driver is this process.
    num_workers : int or (int, int), default 1
        The number of ranks. A pair is the minimum and the maximum: each attempt takes as many as
        there is room for. 0: the training function runs in the process that calls ``fit``, without
        storage, for example in a debugger.
    use_gpu : bool, default False
        Whether each rank has a GPU.
    resources_per_worker : dict of str to float, optional
        The resources of a rank: ``{"CPU": 1}``, and ``"GPU": 1`` with `use_gpu`. Others are those
        of Spark's tasks, and not supported here.
    placement_strategy : str, default "PACK"
        How Ray places ranks: "PACK" or "SPREAD", which ask for no more than Spark does.
        "STRICT_PACK" needs ``local_mode=True``; "STRICT_SPREAD" is not supported.
    accelerator_type : str, optional
        The type that the GPUs must have, such as ``"H100"``; by default any.
    label_selector, use_tpu, topology
        Not supported.
    elastic_resize_monitor_interval_s : float, default 60.0
        For a pair, seconds of an attempt until the next checkpoint at which it may restart with
        more ranks, if there is room for them. Ray Train restarts at any moment.
    local_mode : bool, optional
        True: the ranks run on this machine. False: they run on the executors of the active Spark
        session. By default they run there if there is such a session, and here otherwise.

    Raises
    ------
    TypeError
        If `num_workers` is not an int or a pair of them, or a switch is neither True nor False.
    ValueError
        If `num_workers` is negative, a minimum exceeds its maximum, `resources_per_worker`
        contradicts `use_gpu`, or a value is not supported.

    Examples
    --------
    >>> ScalingConfig(num_workers=(4, 8), use_gpu=True).total_resources
    {'GPU': 8}
    """

    trainer_resources: Mapping[str, float] | None = None
    num_workers: int | tuple[int, int] = 1
    use_gpu: bool = False
    resources_per_worker: Mapping[str, float] | None = None
    placement_strategy: str = "PACK"
    accelerator_type: str | None = None
    label_selector: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None
    use_tpu: bool = False
    topology: str | None = None
    elastic_resize_monitor_interval_s: float = 60.0
    _: KW_ONLY
    local_mode: bool | None = None

    unsupported: ClassVar[Mapping[str, str]] = {
        "trainer_resources": "The driver is this process.",
        "use_tpu": "Use GPUs or CPUs.",
        "topology": "Use GPUs or CPUs.",
    }

    def check(self) -> None:
        """Check all fields; raises what the class documents."""
        super().check()
        if not self.runs_in_process:
            try:
                check_num_processes("num_workers", self.num_workers)
            except TypeError as error:
                raise InvalidArgument(str(error)) from None
            interval = self.elastic_resize_monitor_interval_s
            _check_interval("elastic_resize_monitor_interval_s", interval)
        check_bool("use_gpu", self.use_gpu)
        optional(check_bool)("local_mode", self.local_mode)
        check_gpu_type("accelerator_type", self.gpu_type)
        if self.accelerator_type and not self.use_gpu:
            raise ValueError(
                f"accelerator_type is {self.accelerator_type!r}, but use_gpu is False: ranks have "
                "no GPUs."
            )
        self._check_resources()
        self._check_placement()

    def _check_resources(self) -> None:
        given = self.resources_per_worker or {}
        if not isinstance(given, Mapping):
            raise InvalidArgument(
                "resources_per_worker must map names of resources to amounts, such as {'CPU': 1}, "
                f"but is {given!r}."
            )
        resources = {name: amount for name, amount in given.items() if amount}
        if resources.get("TPU"):
            raise ValueError("resources_per_worker has TPUs, but use_tpu is False.")
        gpus = resources.pop("GPU", None)
        if gpus and not self.use_gpu:
            raise ValueError(f"resources_per_worker has {gpus} GPUs, but use_gpu is False.")
        if self.use_gpu and "GPU" in given and not gpus:
            raise ValueError("resources_per_worker has no GPU, but use_gpu is True.")
        if gpus not in (None, 1) or resources.pop("CPU", 1) != 1 or resources:
            self._refuse("resources_per_worker", given, _TASK_RESOURCES)

    def _check_placement(self) -> None:
        labels = self.label_selector or ()
        if not isinstance(labels, Sequence) or any(labels):
            self._refuse("label_selector", labels, "Spark places the tasks.")
        strategy = self.placement_strategy
        is_known = must_be(f"one of {', '.join(_STRATEGIES)}", in_(*_STRATEGIES))
        is_known("placement_strategy", strategy)
        if strategy.startswith("STRICT") and not (strategy == "STRICT_PACK" and self.local_mode):
            self._refuse("placement_strategy", strategy, "Spark places the tasks.")

    @property
    def runs_in_process(self) -> bool:
        """Whether the training function runs in the process that calls ``fit``."""
        return self.num_workers == 0 and not isinstance(self.num_workers, bool)

    @property
    def gpu_type(self) -> str | None:
        """The type that the GPUs must have, as `TorchDistributor` names it; None for any."""
        return _GPU_TYPES.get(self.accelerator_type or "", self.accelerator_type)

    @property
    def elasticity_enabled(self) -> bool:
        """Whether the number of ranks may vary."""
        return isinstance(self.num_workers, (tuple, list))

    @property
    def min_workers(self) -> int:
        """The minimum number of ranks."""
        return self._range[0]

    @property
    def max_workers(self) -> int:
        """The maximum number of ranks."""
        return self._range[1]

    @property
    def total_resources(self) -> dict[str, float]:
        """The resources of all ranks; of a pair, those of the maximum."""
        return {name: n * self.max_workers for name, n in self._per_worker.items()}

    @property
    def num_cpus_per_worker(self) -> float:
        """The CPUs of a rank."""
        return self._per_worker.get("CPU", 0)

    @property
    def num_gpus_per_worker(self) -> float:
        """The GPUs of a rank."""
        return self._per_worker.get("GPU", 0)

    @property
    def num_tpus_per_worker(self) -> float:
        """The TPUs of a rank: always 0."""
        return 0

    @property
    def additional_resources_per_worker(self) -> dict[str, float]:
        """Other resources of a rank than CPUs and GPUs: always empty."""
        return {}

    @property
    def _range(self) -> tuple[int, int]:
        if self.runs_in_process:
            return 0, 0
        return check_num_processes("num_workers", self.num_workers)

    @property
    def _per_worker(self) -> dict[str, float]:
        if self.resources_per_worker is None:
            return {"GPU": 1} if self.use_gpu else {"CPU": 1}
        resources = {name: n for name, n in self.resources_per_worker.items() if n}
        return {**resources, "GPU": 1} if self.use_gpu else resources


class BackendConfig:
    """The base class of `TorchConfig`.

    Follows ``ray.train.BackendConfig``, whose other subclasses have no counterpart here:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.backend.BackendConfig.html

    Examples
    --------
    >>> isinstance(TorchConfig(), BackendConfig)
    True
    """

    @property
    def framework(self) -> str | None:
        """The framework's name."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration."""
        return {}


@checks_keywords
@dataclass
class TorchConfig(BackendConfig):
    """Configuration of the process group that `TorchTrainer` creates.

    Follows ``ray.train.torch.TorchConfig``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.torch.TorchConfig.html

    Parameters
    ----------
    backend : str, optional
        The backend of ``torch.distributed``, such as ``"gloo"`` or ``"nccl"``. By default gloo for
        CPU tensors and, if the ranks have GPUs, NCCL for GPU tensors.
    init_method : "env" or "tcp", default "env"
        How ranks find rank 0. Both use the run's address.
    timeout_s : int, default 1800
        The time that a collective may take, in seconds.

    Raises
    ------
    ValueError
        If `init_method` is neither ``"env"`` nor ``"tcp"``, or `timeout_s` is not a positive
        number.
    TypeError
        If `backend` is not a string.

    Examples
    --------
    >>> TorchConfig(backend="gloo", timeout_s=60)
    TorchConfig(backend='gloo', init_method='env', timeout_s=60)
    """

    backend: str | None = None
    init_method: str = "env"
    timeout_s: int = 1800

    def __post_init__(self) -> None:
        must_be("'env' or 'tcp'", in_("env", "tcp"))("init_method", self.init_method)
        is_name = must_be("a string such as 'gloo' or 'nccl'", instance_of(str), TypeError)
        optional(is_name)("backend", self.backend)
        if not number_of(int, float)(self.timeout_s) or not self.timeout_s > 0:
            raise ValueError(
                f"timeout_s must be a positive number of seconds, but is {self.timeout_s}."
            )

    @property
    def framework(self) -> str:
        """The framework's name: ``"torch"``."""
        return "torch"

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration."""
        return asdict(self)


@checks_keywords
@dataclass
class FailureConfig(ChecksUnsupported):
    """How often a failed training run is restarted.

    Follows ``ray.train.FailureConfig``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.FailureConfig.html

    Parameters
    ----------
    max_failures : int, default 0
        The number of attempts that may fail before the run fails; -1 for any number. An exception
        that repeats at the same step counts like any other, with a warning.
    fail_fast : bool, optional
        Not supported, as in Ray Train: pass ``max_failures=0``.
    controller_failure_limit : int, default -1
        Has no effect: a run that cannot start is not retried, but waits for slots for as long as
        the setting ``start_timeout``.
    recovery : str, default "restart"
        "in_place" has the other ranks go on in their processes when one is lost, and another
        process take its place. Ray Train has no such parameter.
    max_preemption_failures : int, default -1
        The number of attempts that may fail because a rank or executor dies after a preemption
        notice (see `get_preemption_info`); -1 for any number. They do not count among
        `max_failures`.
    relax_collectives_on_preemption : bool, default False
        Has no effect, with a warning: an attempt that loses a rank ends, and the next one continues
        from the latest checkpoint that all ranks have reported.
    preemption_grace_s : float, default 0.0
        Has no effect, with a warning: no deadline ends the ranks of an attempt, which run until one
        of them is lost.

    Raises
    ------
    ValueError
        If a number of failures is not an int of at least -1, or a value is not supported.

    Examples
    --------
    >>> run_config = RunConfig(failure_config=FailureConfig(max_failures=3))
    """

    max_failures: int = 0
    fail_fast: bool | None = None
    controller_failure_limit: int = -1
    max_preemption_failures: int = -1
    relax_collectives_on_preemption: bool = False
    preemption_grace_s: float = 0.0
    recovery: Literal["restart", "in_place"] = "restart"

    unsupported: ClassVar[Mapping[str, str]] = {"fail_fast": "Pass max_failures=0."}

    def check(self) -> None:
        """Check all fields; raises what the class documents."""
        super().check()
        check_max_failures("max_failures", self.max_failures)
        check_max_failures("max_preemption_failures", self.max_preemption_failures)
        check_bool("relax_collectives_on_preemption", self.relax_collectives_on_preemption)
        _check_interval("preemption_grace_s", self.preemption_grace_s)
        if self.controller_failure_limit not in (-1, 0):
            instead = (
                "Set how long a run waits for slots: RunConfig(settings={'start_timeout': s})."
            )
            self._refuse("controller_failure_limit", self.controller_failure_limit, instead)
        must_be("'restart' or 'in_place'", in_("restart", "in_place"))("recovery", self.recovery)
        if self.relax_collectives_on_preemption and self.recovery == "in_place":
            raise ValueError(
                "relax_collectives_on_preemption must be False with recovery='in_place', with "
                "which the other ranks go on in any case."
            )
        if self.relax_collectives_on_preemption:
            warn_once(
                "relax_collectives_on_preemption has no effect: an attempt that loses a rank ends, "
                "and the next one continues from the latest checkpoint of all ranks."
            )
        if self.preemption_grace_s:
            warn_once(
                "preemption_grace_s has no effect: ranks run until one of them is lost, whatever "
                "the deadline of a preemption."
            )


@checks_keywords
@dataclass
class CheckpointConfig(ChecksUnsupported):
    """Which checkpoints are kept: the latest, and the best.

    Follows ``ray.train.CheckpointConfig``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.CheckpointConfig.html

    Parameters
    ----------
    num_to_keep : int, optional
        The number of the best checkpoints to keep; by default all are kept.
    checkpoint_score_attribute : str, optional
        The metric that checkpoints are ranked by, such as ``"loss"``, or ``"val/loss"`` for one in
        a nested dict; by default their age, the latest first. A checkpoint without the metric ranks
        last.
    checkpoint_score_order : "max" or "min", default "max"
        Whether a high or a low value of the metric is better.
    checkpoint_frequency, checkpoint_at_end
        Not supported, as in Ray Train: the training function decides when it reports a checkpoint.

    Raises
    ------
    TypeError
        If `num_to_keep` is not an int, or `checkpoint_score_attribute` not a str.
    ValueError
        If `num_to_keep` is less than 1, `checkpoint_score_order` is neither "max" nor "min", or a
        value is not supported.

    Examples
    --------
    >>> checkpoint_config = CheckpointConfig(
    ...     num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min"
    ... )
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: Literal["max", "min"] = "max"
    checkpoint_frequency: int | None = None
    checkpoint_at_end: bool | None = None

    unsupported: ClassVar[Mapping[str, str]] = {
        "checkpoint_frequency": "Call report with a checkpoint in the training function.",
        "checkpoint_at_end": "Call report with a checkpoint in the training function.",
    }

    def check(self) -> None:
        """Check all fields; raises what the class documents."""
        super().check()
        count, attribute = self.num_to_keep, self.checkpoint_score_attribute
        if count is not None:
            must_be("a number of checkpoints", number_of(int), TypeError)("num_to_keep", count)
            if count < 1:
                raise ValueError(
                    f"num_to_keep is {count}, but the latest checkpoint is always kept: pass 1 or "
                    "more, or None for all."
                )
        is_metric = must_be("the name of a metric", instance_of(str), TypeError)
        optional(is_metric)("checkpoint_score_attribute", attribute)
        check_order("checkpoint_score_order", self.checkpoint_score_order)
        if attribute is None and self.checkpoint_score_order != "max":
            warn_once(
                "checkpoint_score_order has no effect: without checkpoint_score_attribute, "
                "checkpoints are ranked by their age."
            )


@checks_keywords
@dataclass
class LoggingConfig:
    """Which messages of this package about a run are shown on the driver.

    Follows ``ray.train.LoggingConfig``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.LoggingConfig.html

    Parameters
    ----------
    log_level : str, default "INFO"
        The level of ``logging``, in upper or lower case, below which messages are not shown. The
        output of the ranks is not affected; ``RunConfig(settings={"show_output": ...})`` is.

    Raises
    ------
    ValueError
        If it is not the name of a level.

    Examples
    --------
    >>> LoggingConfig("warning")
    LoggingConfig(log_level='WARNING')
    """

    log_level: str = "INFO"

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check the level; raises what the class documents."""
        upper = self.log_level.upper() if isinstance(self.log_level, str) else ""
        if upper not in LEVELS:
            raise ValueError(
                f"log_level must be one of {', '.join(LEVELS)}, but is {self.log_level!r}."
            )
        self.log_level = upper

    @property
    def level(self) -> int:
        """The level's number."""
        return int(getattr(logging, self.log_level))


@dataclass
class SyncConfig:
    """Accepted for compatibility, without effect: each report uploads its checkpoint to storage.

    `RunConfig` refuses it, as Ray Train's does.

    Follows ``ray.train.SyncConfig``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.SyncConfig.html

    Parameters
    ----------
    sync_period : int, default 300
        Has no effect.
    sync_timeout : int, default 1800
        Has no effect.
    sync_artifacts : bool, default False
        Has no effect.
    sync_artifacts_on_checkpoint : bool, default True
        Has no effect.

    Examples
    --------
    >>> SyncConfig().sync_period
    300
    """

    sync_period: int = 300
    sync_timeout: int = 1800
    sync_artifacts: bool = False
    sync_artifacts_on_checkpoint: bool = True


@dataclass(eq=False, repr=False)
class DataConfig:
    """How the datasets of a `TorchTrainer` are split among the ranks.

    As in Ray Train, each rank gets the same number of rows of a dataset that is split, and the
    rows that are left over are dropped: fewer than there are ranks.

    Follows ``ray.train.DataConfig``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.DataConfig.html

    Parameters
    ----------
    datasets_to_split : "all" or list of str, default "all"
        The datasets that are split; each rank has all of the others.
    execution_options : object, optional
        Options of Ray Data, which have no effect here.
    enable_shard_locality : bool, default True
        Has no effect here.

    Raises
    ------
    TypeError
        If `datasets_to_split` is neither "all" nor a list.

    Examples
    --------
    >>> data_config = DataConfig(datasets_to_split=[TRAIN_DATASET_KEY])
    """

    datasets_to_split: Literal["all"] | Sequence[str] = "all"
    execution_options: Any = None
    enable_shard_locality: bool = True

    def __post_init__(self) -> None:
        is_split = any_of(in_("all"), instance_of(list))
        must_be("'all' or a list of names of datasets", is_split, TypeError)(
            "datasets_to_split", self.datasets_to_split
        )

    def datasets_of(self, datasets: Mapping[str, Any]) -> dict[str, Any]:
        """Return the datasets of a trainer, with how ranks share those that are DataFrames.

        Raises
        ------
        TypeError
            If a name is no string, or a dataset of another type.
        ValueError
            If `datasets_to_split` has a name that no dataset has.
        """
        names = list(datasets) if self.datasets_to_split == "all" else self.datasets_to_split
        if unknown := [name for name in names if name not in datasets]:
            raise ValueError(
                f"datasets_to_split has {unknown}, but TorchTrainer(datasets=...) has "
                f"{sorted(datasets)}. {suggestion(unknown[0], datasets)}".rstrip()
            )
        return {name: _dataset(name, value, name in names) for name, value in datasets.items()}


def _dataset(name: str, value: Any, split: bool) -> Any:
    if not isinstance(name, str):
        raise TypeError(f"The names of datasets must be strings, but {name!r} is not.")
    if is_dataframe(value):
        return SparkDataset(value, "drop", split, name)
    if isinstance(value, SparkDataset):
        return replace(value, name=name, split=value.split and split)
    from distributor.data.shard import DatasetShard  # which needs pyarrow

    if isinstance(value, DatasetShard):
        return value
    kind = f"{type(value).__module__}.{type(value).__name__}"
    raise TypeError(
        f"datasets[{name!r}] is of type {kind}. Pass a Spark DataFrame, or "
        "distributor.data.from_parquet(path)."
    )


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
        super().__post_init__()

    @property
    def uses_default_path(self) -> bool:
        """Whether `storage_path` was not chosen by the user."""
        return self._had_no_path and self.storage_path == _default_path()

    def check(self) -> None:
        """Check all fields; raises what the class documents."""
        super().check()
        check_name("RunConfig.name", self.name)
        for name, kind in (
            ("failure_config", FailureConfig),
            ("checkpoint_config", CheckpointConfig),
            ("logging_config", LoggingConfig),
            ("worker_runtime_env", Mapping),
            ("settings", Mapping),
        ):
            check_instance(name, getattr(self, name), kind)
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
        must_be(
            "a list of modules, or of their names or paths",
            items(Sequence, lambda module: True),
            InvalidArgument,
        )("worker_runtime_env['py_modules']", self.worker_runtime_env.get("py_modules") or [])

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

    The methods are called one at a time, on a thread of the run's own, while the ranks continue:
    an MLflow run that is active on the caller's thread is not active in them. They receive their
    arguments by keyword. If one raises an exception, the run ends with a `ControllerError`.

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
