"""Where the ranks of a `TorchTrainer` run, and the distributor and the storage that it uses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from distributor.core.checkpoint_config import CheckpointSettings
from distributor.core.paths import absolute
from distributor.core.spelling import Spelling, suggestion
from distributor.launch.run_listener import Listener
from distributor.launch.setting_types import check_listeners
from distributor.launch.spark.session import Session
from distributor.torch_distributor import TorchDistributor
from distributor.train.checkpoint import Checkpoint
from distributor.train.run_config import RunConfig
from distributor.train.scaling_config import ScalingConfig
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.positions import latest_positions

_SET_ELSEWHERE = {
    "gpu_type",
    "local_mode",
    "max_failures",
    "max_preemption_failures",
    "name",
    "num_processes",
    "storage_path",
    "use_gpu",
}
"""Parameters of `TorchDistributor` that other parameters than ``RunConfig.settings`` determine."""
_SPELLING = Spelling(
    "TorchTrainer",
    "num_workers",
    "pass ScalingConfig(local_mode=True)",
    "pass ScalingConfig(use_gpu=False)",
)


@dataclass(frozen=True)
class _Distributor(TorchDistributor):
    """Names in messages what the user of `TorchTrainer` wrote."""

    spelling = _SPELLING

    storage_filesystem: Any = None
    resume_from: Checkpoint | None = None

    def _stored_positions(self, env: Mapping[str, str]) -> Mapping[str, Any]:
        settings = CheckpointSettings.from_env(env)
        assert settings is not None, "a trainer's run has storage"
        return latest_positions(settings, self.storage_filesystem, self.resume_from)


@dataclass(frozen=True)
class Placement:
    """Where the ranks run.

    Parameters
    ----------
    local_mode : bool
        Whether they run on this machine, and not on the executors of the active Spark session.
    reason : str
        Why.
    """

    local_mode: bool
    reason: str

    @classmethod
    def of(cls, scaling: ScalingConfig) -> Placement:
        """Choose the place: the one that the user has chosen, or the active Spark session's."""
        if scaling.local_mode is not None:
            chosen = bool(scaling.local_mode)
            return cls(chosen, f"as ScalingConfig(local_mode={chosen}) says")
        if Session.active() is None:
            return cls(True, "because there is no active Spark session")
        otherwise = "ScalingConfig(local_mode=True) runs them on this machine"
        return cls(False, f"because there is one; {otherwise}")

    def __str__(self) -> str:
        place = "on this machine" if self.local_mode else "on executors of the active Spark session"
        return f"TorchTrainer runs its ranks {place}, {self.reason}."

    @property
    def is_one_machine(self) -> bool:
        """Whether all ranks certainly share this machine's files."""
        return self.local_mode or Session.require_active(_SPELLING.run_here).is_one_machine


def checkpoint_settings(
    run: RunConfig, placement: Placement, validates: bool
) -> CheckpointSettings:
    """Return the storage of a run, and whether it validates checkpoints.

    Raises
    ------
    ValueError
        If it has the default path, which other hosts do not see.
    RuntimeError
        If there is no active Spark session.
    """
    if run.uses_default_path and not placement.is_one_machine:
        raise ValueError(
            "On a cluster of several hosts, RunConfig needs a storage_path that all of them see: a "
            "mounted folder, or an address such as s3://bucket/runs. (Or pass "
            "ScalingConfig(local_mode=True) to run on this machine.)"
        )
    checkpoints, path = run.checkpoint_config, os.fspath(run.storage_path)
    if run.storage_filesystem is None:
        path = absolute(path, "storage_path")  # ranks may have another working directory
    return CheckpointSettings(
        storage_path=path,
        name=run.name,
        num_to_keep=checkpoints.num_to_keep,
        score_attribute=checkpoints.checkpoint_score_attribute,
        score_order=checkpoints.checkpoint_score_order,
        validates=validates,
    )


def open_storage(run: RunConfig, settings: CheckpointSettings) -> Storage:
    """Return the storage of a run; raises now, not after the training, if it is unreadable."""
    storage = Storage(settings.storage_path, settings.name, run.storage_filesystem)
    try:
        storage.folders()
    except Exception as error:
        if run.storage_filesystem is None or not run.uses_default_path:
            raise
        raise ValueError(
            f"RunConfig has a storage_filesystem, but no storage_path, and {settings.storage_path} "
            f"cannot be read in it: {error}. Pass a path in it, such as storage_path='bucket/runs'."
        ) from error
    return storage


def create_distributor(
    run: RunConfig,
    scaling: ScalingConfig,
    placement: Placement,
    settings: CheckpointSettings,
    listener: Listener,
    resume_from: Checkpoint | None,
) -> TorchDistributor:
    """Return a distributor for a trainer's configuration.

    Raises
    ------
    ValueError
        If ``RunConfig.settings`` has a parameter that `TorchDistributor` does not know, or that is
        set elsewhere.
    """
    given = run.all_settings()
    if misplaced := _SET_ELSEWHERE & given.keys():
        raise ValueError(
            f"RunConfig.settings has {sorted(misplaced)}, which other parameters of TorchTrainer "
            "and its configuration determine."
        )
    known = {field.name for field in fields(TorchDistributor)} - _SET_ELSEWHERE
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"RunConfig.settings has {unknown}. {suggestion(unknown[0], known)}")
    env = {**given.pop("env"), **settings.to_variable()}
    others = given.pop("listeners", ())
    others = [others] if isinstance(others, Listener) else others
    check_listeners("listeners", others)
    return _Distributor(
        scaling.num_workers,
        local_mode=placement.local_mode,
        use_gpu=scaling.use_gpu,
        gpu_type=scaling.gpu_type,
        max_failures=run.failure_config.max_failures,
        max_preemption_failures=run.failure_config.max_preemption_failures,
        env=env,
        listeners=(*others, listener),
        storage_filesystem=run.storage_filesystem,
        resume_from=resume_from,
        **given,
    )
