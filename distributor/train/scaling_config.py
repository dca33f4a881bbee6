"""The number of ranks, and their machines, under Ray Train's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from distributor.core.spelling import checks_keywords
from distributor.launch.setting_types import check_bool, check_gpu_type, check_num_processes
from distributor.train.config import ChecksUnsupported, InvalidArgument

_TASK_RESOURCES = (
    "Set the resources of a task for the cluster: spark.task.cpus, spark.task.resource.gpu.amount."
)
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_RESIZE_INTERVAL = 60.0
_GPU_TYPES = {"A10G": "A10"}
"""The types that Ray names differently."""


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
        Only the default is supported for a pair: ranks are not added while they run.
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
    elastic_resize_monitor_interval_s: float = _RESIZE_INTERVAL
    _: KW_ONLY
    local_mode: bool | None = None

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
        if not self.runs_in_process:
            self._check_num_workers()
        check_bool("use_gpu", self.use_gpu)
        if self.local_mode is not None:
            check_bool("local_mode", self.local_mode)
        check_gpu_type("accelerator_type", self.gpu_type)
        if self.accelerator_type and not self.use_gpu:
            raise ValueError(
                f"accelerator_type is {self.accelerator_type!r}, but use_gpu is False: ranks have "
                "no GPUs."
            )
        self._check_resources()
        self._check_placement()

    def _check_num_workers(self) -> None:
        try:
            check_num_processes("num_workers", self.num_workers)
        except TypeError as error:
            raise InvalidArgument(str(error)) from None
        interval = self.elastic_resize_monitor_interval_s
        if isinstance(interval, bool) or not isinstance(interval, (int, float)):
            raise InvalidArgument(
                "elastic_resize_monitor_interval_s must be a number of seconds, but is "
                f"{interval!r}."
            )
        if interval < 0:
            raise ValueError(f"elastic_resize_monitor_interval_s is negative: {interval}.")
        if self.elasticity_enabled and interval != _RESIZE_INTERVAL:
            instead = "The number of ranks is chosen for each attempt, and not changed in between."
            self._refuse("elastic_resize_monitor_interval_s", interval, instead)

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
        if strategy not in _STRATEGIES:
            raise ValueError(
                f"placement_strategy must be one of {', '.join(_STRATEGIES)}, but is {strategy!r}."
            )
        is_honoured = strategy == "STRICT_PACK" and self.local_mode
        if strategy.startswith("STRICT") and not is_honoured:
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
        return (
            (0, 0) if self.runs_in_process else check_num_processes("num_workers", self.num_workers)
        )

    @property
    def _per_worker(self) -> dict[str, float]:
        if self.resources_per_worker is None:
            return {"GPU": 1} if self.use_gpu else {"CPU": 1}
        resources = {name: n for name, n in self.resources_per_worker.items() if n}
        return {**resources, "GPU": 1} if self.use_gpu else resources
