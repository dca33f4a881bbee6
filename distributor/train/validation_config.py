"""What validates a checkpoint, under Ray Train's names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from distributor.launch.programs import check_runs
from distributor.launch.setting_types import check_bool, check_timeout, instance_of, must_be
from distributor.train.config import UnsupportedParameter
from distributor.train.storage.checkpoint import Checkpoint

_REMOTE_KWARGS = {"num_gpus": (0, 1), "max_retries": (0,)}
"""The values of options of a Ray task that can be honoured; None changes nothing."""


class ValidationFn(Protocol):
    """The type of a function that validates a checkpoint.

    Follows ``ray.train.ValidationFn``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.ValidationFn.html

    Examples
    --------
    >>> def validate(checkpoint: Checkpoint, batch_size: int = 32) -> dict[str, float]:
    ...     with checkpoint.as_directory() as folder:
    ...         return {"accuracy": 0.9}
    """

    def __call__(self, checkpoint: Checkpoint, **kwargs: Any) -> dict[str, Any]:
        """Return metrics of a checkpoint."""


@dataclass
class ValidationTaskConfig:
    """One validation, for `distributor.train.report`.

    Follows ``ray.train.ValidationTaskConfig``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.ValidationTaskConfig.html

    Parameters
    ----------
    fn_kwargs : dict of str to object, optional
        Keyword arguments of the function, JSON-serializable; by default none.
    timeout_s : float, optional
        Seconds that the function may take; by default no limit.

    Raises
    ------
    TypeError
        If `fn_kwargs` is no dict, or not JSON-serializable, or `timeout_s` is no number.
    ValueError
        If `timeout_s` is not positive.

    Examples
    --------
    >>> ValidationTaskConfig({"batch_size": 64}, timeout_s=600)
    ValidationTaskConfig(fn_kwargs={'batch_size': 64}, timeout_s=600)
    """

    fn_kwargs: dict[str, Any] | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        self.fn_kwargs = {} if self.fn_kwargs is None else self.fn_kwargs
        self.check()

    def check(self) -> None:
        """Check all fields; raises what the class documents."""
        check_timeout("timeout_s", self.timeout_s)
        must_be("a dict", instance_of(dict), TypeError)("fn_kwargs", self.fn_kwargs)
        try:
            json.dumps(self.fn_kwargs)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"fn_kwargs must be JSON-serializable, but is {self.fn_kwargs!r}: {error}."
            ) from None


class ValidationConfig:
    """The validation of a run's checkpoints.

    Follows ``ray.train.ValidationConfig``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.ValidationConfig.html

    Parameters
    ----------
    fn : ValidationFn
        The function. It takes a checkpoint and returns a dict of metrics, which join those that
        were reported with the checkpoint. It runs in a process of its own, and may start another
        training there.
    task_config : ValidationTaskConfig, optional
        Arguments and time limit, unless a report passes its own; by default none.
    ray_remote_kwargs : dict of str to object, optional
        With ``{"num_gpus": 1}`` the process has a GPU: the last one of this machine. ``num_cpus``
        and ``max_retries=0`` change nothing, and others are not supported.
    local_mode : bool, default True
        True: the process runs on this machine. False: it runs on an executor of the active Spark
        session, which needs a free slot beside those of the training. Not a parameter of Ray's
        class.

    Raises
    ------
    TypeError
        If `fn` is not a function or `task_config` is of another class.
    ValueError
        If a value is not supported.

    Examples
    --------
    >>> def validate(checkpoint, batch_size):
    ...     return {"accuracy": 0.9}
    >>> validation_config = ValidationConfig(
    ...     validate, ValidationTaskConfig({"batch_size": 64}, timeout_s=600)
    ... )
    """

    def __init__(
        self,
        fn: ValidationFn | Callable[..., dict[str, Any]],
        task_config: ValidationTaskConfig | None = None,
        ray_remote_kwargs: dict[str, Any] | None = None,
        *,
        local_mode: bool = True,
    ) -> None:
        self.fn = fn
        self.task_config = ValidationTaskConfig() if task_config is None else task_config
        self.ray_remote_kwargs = {} if ray_remote_kwargs is None else ray_remote_kwargs
        self.local_mode = local_mode
        self.check()

    def check(self) -> None:
        """Check all attributes; raises what the class documents."""
        must_be("a function", callable, TypeError)("ValidationConfig.fn", self.fn)
        check_runs(self.fn)
        is_task = instance_of(ValidationTaskConfig)
        must_be("a ValidationTaskConfig", is_task, TypeError)("task_config", self.task_config)
        self.task_config.check()
        check_bool("local_mode", self.local_mode)
        for name, value in self.ray_remote_kwargs.items():
            if name != "num_cpus" and value not in (None, *_REMOTE_KWARGS.get(name, ())):
                raise UnsupportedParameter(
                    f"ValidationConfig: {name} is {value!r} in ray_remote_kwargs, which is not "
                    "supported on Spark. A validation runs once, in one process with no GPU or "
                    "one: num_gpus may be 0 or 1."
                )

    @property
    def use_gpu(self) -> bool:
        """Whether the function's process has a GPU."""
        return self.ray_remote_kwargs.get("num_gpus") == 1

    def task(self, requested: Mapping[str, Any]) -> ValidationTaskConfig:
        """Return the validation that a report has requested; the default one if it is empty."""
        if not requested:
            return self.task_config
        kwargs = {**(self.task_config.fn_kwargs or {}), **requested["fn_kwargs"]}
        return ValidationTaskConfig(kwargs, requested["timeout_s"])
