"""The process of a validation: a run with one rank, which calls the user's function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from distributor.core.spelling import Spelling
from distributor.launch.spark.plan import GPUS_OF_NESTED_RUNS, driver_gpus
from distributor.launch.spark.session import Session
from distributor.serialization.pickle_diagnostics import name_of
from distributor.torch_distributor import TorchDistributor
from distributor.train.checkpoint import Checkpoint
from distributor.train.runtime.json_metrics import json_metrics
from distributor.train.validation.config import ValidationConfig

_OF_THE_TRAINING = ("listeners", "rank_ports", "timeout")
"""Settings of a training that do not apply to its validations."""


class ValidationDistributor(TorchDistributor):
    """Runs validations, which have no MLflow runs of their own."""

    is_tracked: ClassVar[bool] = False
    spelling = Spelling(
        "ValidationConfig",
        run_here="leave out local_mode=False",
        run_on_cpus="leave num_gpus out of ray_remote_kwargs",
    )


def validation_distributor(
    config: ValidationConfig, settings: Mapping[str, Any], gpu_type: str | None
) -> TorchDistributor:
    """Return the distributor for a run's validations.

    Parameters
    ----------
    config : ValidationConfig
        Where the validations run.
    settings : mapping of str to object
        The parameters of `TorchDistributor` that the training has.
    gpu_type : str or None
        The type that a GPU must have.

    Raises
    ------
    RuntimeError
        If the validation cannot run there: there is no GPU, or no active Spark session.
    """
    shared = {name: each for name, each in settings.items() if name not in _OF_THE_TRAINING}
    env = {**_gpu_variables(config), **shared.pop("env", {})}
    return ValidationDistributor(
        1,
        local_mode=config.local_mode,
        use_gpu=config.use_gpu,
        gpu_type=gpu_type if config.use_gpu else None,
        env=env,
        rank_ports=None,  # the training may use all of them
        **shared,
    )


def _gpu_variables(config: ValidationConfig) -> dict[str, str]:
    """Return the variables that select GPUs: from the last one on, the training uses the first."""
    gpus = driver_gpus(Session.active()) if config.local_mode else ()
    if not gpus:
        return {}
    own = {"CUDA_VISIBLE_DEVICES": gpus[-1]} if config.use_gpu else {}
    return {GPUS_OF_NESTED_RUNS: ",".join(reversed(gpus)), **own}


@dataclass(frozen=True)
class ValidationCall:
    """The program of a validation.

    Parameters
    ----------
    func : callable
        The user's function. It takes a checkpoint, and returns a dict of metrics.
    """

    func: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return name_of(self.func)

    def __call__(self, checkpoint: Checkpoint, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Validate a checkpoint, and return its metrics.

        Raises
        ------
        TypeError
            If the function returns no dict, or JSON cannot represent a value in it.
        """
        metrics = self.func(checkpoint, **kwargs)
        if not isinstance(metrics, dict):
            raise TypeError(
                f"{name_of(self.func)} validates a checkpoint, and so must return a dict of "
                f"metrics, but has returned {metrics!r}."
            )
        return json_metrics(metrics)
