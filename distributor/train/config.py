"""Configuration of restarts, checkpoints and messages, under Ray Train's names.

The parameters are checked when an object is created. Fields can be set afterwards, and are checked
again when the training starts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from distributor.core.spelling import checks_keywords
from distributor.launch.one_time_warnings import warn_once
from distributor.launch.setting_types import check_max_failures

LEVELS: dict[str, int] = {
    name: getattr(logging, name)
    for name in ("CRITICAL", "DEBUG", "ERROR", "FATAL", "INFO", "NOTSET", "WARN", "WARNING")
}
"""The levels of ``logging`` by name."""


class InvalidArgument(TypeError, ValueError):
    """An argument has the wrong type, for which Ray raises ValueError."""


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
    max_preemption_failures : int, default -1
        The number of attempts that may fail because a rank or executor dies after a preemption
        notice (see `get_preemption_info`); -1 for any number. They do not count among
        `max_failures`.
    relax_collectives_on_preemption : bool, default False
        Not supported: an attempt ends when it loses a rank.
    preemption_grace_s : float, default 0.0
        Not supported: an attempt ends when it loses a rank.

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

    unsupported: ClassVar[Mapping[str, str]] = {
        "fail_fast": "Pass max_failures=0.",
        "relax_collectives_on_preemption": "An attempt ends when it loses a rank.",
        "preemption_grace_s": "An attempt ends when it loses a rank.",
    }

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check all fields; raises what the class documents."""
        self._check_unsupported()
        check_max_failures("max_failures", self.max_failures)
        check_max_failures("max_preemption_failures", self.max_preemption_failures)
        if self.controller_failure_limit not in (-1, 0):
            instead = (
                "Set how long a run waits for slots: RunConfig(settings={'start_timeout': s})."
            )
            self._refuse("controller_failure_limit", self.controller_failure_limit, instead)


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
        attribute = self.checkpoint_score_attribute
        if attribute is not None and not isinstance(attribute, str):
            raise TypeError(
                f"checkpoint_score_attribute must be the name of a metric, but is {attribute!r}."
            )
        if self.checkpoint_score_order not in ("max", "min"):
            raise ValueError(
                "checkpoint_score_order must be 'max' or 'min', but is "
                f"{self.checkpoint_score_order!r}."
            )
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
        level = self.log_level.upper() if isinstance(self.log_level, str) else None
        if level not in LEVELS:
            raise ValueError(
                f"log_level must be one of {', '.join(LEVELS)}, but is {self.log_level!r}."
            )
        self.log_level = level

    @property
    def level(self) -> int:
        """The level's number."""
        return LEVELS[self.log_level]


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
