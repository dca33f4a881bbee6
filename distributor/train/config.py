"""Configuration of ranks, restarts and checkpoints, under Ray Train's names.

The parameters are checked when an object is created.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from distributor.launch.setting_checks import check_bool, check_max_failures, check_num_processes


class ChecksUnsupported:
    """Rejects parameters of Ray's class that have no meaning on Spark."""

    unsupported: ClassVar[Mapping[str, str]] = {}
    """By parameter, what to do instead."""

    def _check_unsupported(self) -> None:
        for name, instead in self.unsupported.items():
            if (value := getattr(self, name)) not in (None, False):
                raise ValueError(
                    f"{type(self).__name__}: {name} is {value!r}, which is not supported on Spark. "
                    f"{instead}"
                )


_TASK_RESOURCES = (
    "Set the resources of a task for the cluster: spark.task.cpus, spark.task.resource.gpu.amount."
)


@dataclass(frozen=True, kw_only=True)
class ScalingConfig(ChecksUnsupported):
    """The number of ranks, and the machines that they run on.

    Follows ``ray.train.ScalingConfig``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.ScalingConfig.html

    Parameters
    ----------
    num_workers : int or (int, int), default 1
        The number of ranks; a pair is the minimum and the maximum.
    use_gpu : bool, default False
        Whether each rank has a GPU.
    accelerator_type : str, optional
        The type that the GPUs must have, such as ``"H100"``; by default any.
    local_mode : bool, default True
        True: the ranks run on this machine. False: they run on the executors of the active Spark
        session.
    resources_per_worker, placement_strategy, trainer_resources, use_tpu, topology, \
bundle_label_selector
        Not supported on Spark; any value raises ValueError.

    Raises
    ------
    TypeError
        If `num_workers` is not an int or a pair of them, or a switch is neither True nor False.
    ValueError
        If `num_workers` is less than 1, a minimum exceeds its maximum, or a parameter is not
        supported.

    Examples
    --------
    >>> scaling_config = ScalingConfig(num_workers=(4, 8), use_gpu=True, local_mode=False)
    """

    num_workers: int | tuple[int, int] = 1
    use_gpu: bool = False
    accelerator_type: str | None = None
    local_mode: bool = True
    resources_per_worker: Any = None
    placement_strategy: Any = None
    trainer_resources: Any = None
    use_tpu: Any = None
    topology: Any = None
    bundle_label_selector: Any = None

    unsupported: ClassVar[Mapping[str, str]] = {
        "resources_per_worker": _TASK_RESOURCES,
        "placement_strategy": "Spark places the tasks.",
        "trainer_resources": "The driver is this process.",
        "use_tpu": "Use GPUs or CPUs.",
        "topology": "Use GPUs or CPUs.",
        "bundle_label_selector": "Spark places the tasks.",
    }

    def __post_init__(self) -> None:
        self._check_unsupported()
        check_num_processes(self.num_workers, "num_workers")
        check_bool("use_gpu", self.use_gpu)
        check_bool("local_mode", self.local_mode)


@dataclass(frozen=True)
class FailureConfig(ChecksUnsupported):
    """How often a failed training run is restarted.

    Follows ``ray.train.FailureConfig``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.FailureConfig.html

    Parameters
    ----------
    max_failures : int, default 0
        The number of attempts that may fail before the run fails; -1 for any number.
    controller_failure_limit, fail_fast
        Not supported; any value raises ValueError.

    Raises
    ------
    ValueError
        If `max_failures` is not an int of at least -1, or a parameter is not supported.

    Examples
    --------
    >>> run_config = RunConfig(failure_config=FailureConfig(max_failures=3))
    """

    max_failures: int = 0
    controller_failure_limit: Any = None
    fail_fast: Any = None

    unsupported: ClassVar[Mapping[str, str]] = {
        "controller_failure_limit": "The driver is this process.",
        "fail_fast": "Pass max_failures=0.",
    }

    def __post_init__(self) -> None:
        self._check_unsupported()
        check_max_failures("max_failures", self.max_failures)


@dataclass(frozen=True)
class CheckpointConfig(ChecksUnsupported):
    """Which checkpoints are kept: the latest, and the best.

    Follows ``ray.train.CheckpointConfig``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.CheckpointConfig.html

    Parameters
    ----------
    num_to_keep : int, optional
        The number of the best checkpoints to keep; by default all are kept.
    checkpoint_score_attribute : str, optional
        The metric that checkpoints are ranked by; by default their age, the latest first. A
        checkpoint without the metric ranks last; only one that is reported with a
        ``checkpoint_dir_name`` may lack it.
    checkpoint_score_order : "max" or "min", default "max"
        Whether a high or a low value of the metric is better.
    checkpoint_frequency, checkpoint_at_end
        Not supported, because the training function decides when it reports a checkpoint; any value
        raises ValueError.

    Raises
    ------
    TypeError
        If `num_to_keep` is not an int.
    ValueError
        If `num_to_keep` is less than 1, `checkpoint_score_order` is neither "max" nor "min", or a
        parameter is not supported.

    Examples
    --------
    >>> checkpoint_config = CheckpointConfig(
    ...     num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min"
    ... )
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: Literal["max", "min"] = "max"
    checkpoint_frequency: Any = None
    checkpoint_at_end: Any = None

    unsupported: ClassVar[Mapping[str, str]] = {
        "checkpoint_frequency": "Call report with a checkpoint in the training function.",
        "checkpoint_at_end": "Call report with a checkpoint in the training function.",
    }

    def __post_init__(self) -> None:
        self._check_unsupported()
        count = self.num_to_keep
        if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
            raise TypeError(f"num_to_keep must be a number of checkpoints, but is {count!r}.")
        if count is not None and count < 1:
            raise ValueError(
                f"num_to_keep is {count}, but the latest checkpoint is always kept: pass 1 or "
                "more, or None for all."
            )
        if self.checkpoint_score_order not in ("max", "min"):
            raise ValueError(
                "checkpoint_score_order must be 'max' or 'min', but is "
                f"{self.checkpoint_score_order!r}."
            )
