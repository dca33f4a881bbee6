"""Configuration of ranks, restarts and checkpoints, under Ray Train's names.

The parameters are checked when an object is created. Fields can be set afterwards, and are checked
again when the training starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

from distributor.launch.setting_checks import (
    check_bool,
    check_gpu_type,
    check_max_failures,
    check_num_processes,
)


class UnsupportedParameter(DeprecationWarning, ValueError):
    """A parameter of Ray's class has a value that cannot be honoured on Spark.

    It is a DeprecationWarning too, because Ray raises that for the parameters that it no longer
    supports itself.
    """


class ChecksUnsupported:
    """Rejects parameters of Ray's class that have no meaning on Spark."""

    unsupported: ClassVar[Mapping[str, str]] = {}
    """By parameter, what to do instead. None, False and what is empty change nothing."""

    def _check_unsupported(self) -> None:
        for name, instead in self.unsupported.items():
            if value := getattr(self, name):
                self._refuse(name, value, instead)

    def _refuse(self, name: str, value: object, instead: str) -> None:
        raise UnsupportedParameter(
            f"{type(self).__name__}: {name} is {value!r}, which is not supported on Spark. "
            f"{instead}"
        )


_TASK_RESOURCES = (
    "Set the resources of a task for the cluster: spark.task.cpus, spark.task.resource.gpu.amount."
)


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
        The number of ranks; a pair is the minimum and the maximum.
    use_gpu : bool, default False
        Whether each rank has a GPU.
    resources_per_worker : dict of str to float, optional
        The resources of a rank: ``{"CPU": 1}``, and ``"GPU": 1`` with `use_gpu`. Others are those
        of Spark's tasks, and not supported here.
    placement_strategy : str, default "PACK"
        How Ray places ranks, "PACK" or "SPREAD", if it can. Spark places its tasks itself.
    accelerator_type : str, optional
        The type that the GPUs must have, such as ``"H100"``; by default any.
    label_selector, use_tpu, topology
        Not supported.
    elastic_resize_monitor_interval_s : float, default 60.0
        Has no effect: the number of ranks of a pair is chosen for each attempt.
    local_mode : bool, default True
        True: the ranks run on this machine. False: they run on the executors of the active Spark
        session.

    Raises
    ------
    TypeError
        If `num_workers` is not an int or a pair of them, or a switch is neither True nor False.
    ValueError
        If `num_workers` is less than 1, a minimum exceeds its maximum, `resources_per_worker`
        contradicts `use_gpu`, or a value is not supported.

    Examples
    --------
    >>> scaling_config = ScalingConfig(num_workers=(4, 8), use_gpu=True, local_mode=False)
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
    local_mode: bool = True

    unsupported: ClassVar[Mapping[str, str]] = {
        "trainer_resources": "The driver is this process.",
        "use_tpu": "Use GPUs or CPUs.",
        "topology": "Use GPUs or CPUs.",
    }

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check all fields; raises what the class documents."""
        self._check_unsupported()
        check_num_processes(self.num_workers, "num_workers")
        check_bool("use_gpu", self.use_gpu)
        check_bool("local_mode", self.local_mode)
        check_gpu_type("accelerator_type", self.accelerator_type)
        self._check_resources()
        selectors = self.label_selector or ()
        if any(selectors):
            self._refuse("label_selector", selectors, "Spark places the tasks.")
        if self.placement_strategy not in ("PACK", "SPREAD"):
            self._refuse("placement_strategy", self.placement_strategy, "Spark places the tasks.")

    def _check_resources(self) -> None:
        resources = {name: n for name, n in (self.resources_per_worker or {}).items() if n}
        gpus = resources.pop("GPU", None)
        if gpus and not self.use_gpu:
            raise ValueError(f"resources_per_worker has {gpus} GPUs, but use_gpu is False.")
        if self.use_gpu and "GPU" in (self.resources_per_worker or {}) and not gpus:
            raise ValueError("resources_per_worker has no GPU, but use_gpu is True.")
        if gpus not in (None, 1) or resources.pop("CPU", 1) != 1 or resources:
            self._refuse("resources_per_worker", self.resources_per_worker, _TASK_RESOURCES)


@dataclass
class FailureConfig(ChecksUnsupported):
    """How often a failed training run is restarted.

    Follows ``ray.train.FailureConfig``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.FailureConfig.html

    Parameters
    ----------
    max_failures : int, default 0
        The number of attempts that may fail before the run fails; -1 for any number.
    fail_fast : bool, optional
        Not supported, as in Ray Train: pass ``max_failures=0``.
    controller_failure_limit : int, default -1
        Has no effect: the driver is this process.
    max_preemption_failures : int, default -1
        Not supported: preempted attempts count among `max_failures`.
    relax_collectives_on_preemption : bool, default False
        Not supported: an attempt ends when it loses a node.
    preemption_grace_s : float, default 0.0
        Not supported: an attempt ends when it loses a node.

    Raises
    ------
    ValueError
        If `max_failures` is not an int of at least -1, or a value is not supported.

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

    unsupported: ClassVar[Mapping[str, str]] = {
        "fail_fast": "Pass max_failures=0.",
        "relax_collectives_on_preemption": "An attempt ends when it loses a node.",
        "preemption_grace_s": "An attempt ends when it loses a node.",
    }

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check all fields; raises what the class documents."""
        self._check_unsupported()
        check_max_failures("max_failures", self.max_failures)
        if self.max_preemption_failures != -1:
            instead = "Preempted attempts count among max_failures."
            self._refuse("max_preemption_failures", self.max_preemption_failures, instead)


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
        If `num_to_keep` is not an int.
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

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check all fields; raises what the class documents."""
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
