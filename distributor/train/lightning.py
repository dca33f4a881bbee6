"""PyTorch Lightning on the ranks of a run, under the names of ``ray.train.lightning``.

Needs ``lightning`` or ``pytorch_lightning``. If both are installed, the classes are made for the
one that the program has imported.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributor.core.files import private_folder
from distributor.rank.context import device
from distributor.train import (
    Checkpoint,
    CheckpointUploadMode,
    ValidationTaskConfig,
    get_context,
    report,
)

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import torch
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment
else:

    def _import_lightning() -> Any:
        known = ("lightning.pytorch", "pytorch_lightning")
        for name in sorted(known, key=lambda name: name not in sys.modules):
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError:
                continue
        raise ModuleNotFoundError(
            "distributor.train.lightning needs PyTorch Lightning: pip install lightning.",
            name="lightning",
        )

    pl = _import_lightning()
    environments = importlib.import_module(f"{pl.__name__}.plugins.environments")
    LightningEnvironment = environments.LightningEnvironment

__all__ = [
    "RayDDPStrategy",
    "RayDeepSpeedStrategy",
    "RayFSDPStrategy",
    "RayLightningEnvironment",
    "RayTrainReportCallback",
    "prepare_trainer",
]


class _OfRank:
    """What the strategies have in common: this rank's device, and its share of the data."""

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The arguments of the sampler that shards the data."""
        context = get_context()
        return {"num_replicas": context.get_world_size(), "rank": context.get_world_rank()}


class RayDDPStrategy(_OfRank, pl.strategies.DDPStrategy):
    """Lightning's ``DDPStrategy`` on this rank's device.

    Follows ``ray.train.lightning.RayDDPStrategy``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.lightning.RayDDPStrategy.html

    Examples
    --------
    >>> trainer = pl.Trainer(  # doctest: +SKIP
    ...     strategy=RayDDPStrategy(), plugins=[RayLightningEnvironment()]
    ... )
    """


class RayFSDPStrategy(_OfRank, pl.strategies.FSDPStrategy):
    """Lightning's ``FSDPStrategy`` on this rank's device.

    Follows ``ray.train.lightning.RayFSDPStrategy``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.lightning.RayFSDPStrategy.html

    Examples
    --------
    >>> strategy = RayFSDPStrategy(sharding_strategy="FULL_SHARD")  # doctest: +SKIP
    """


class RayDeepSpeedStrategy(_OfRank, pl.strategies.DeepSpeedStrategy):
    """Lightning's ``DeepSpeedStrategy`` on this rank's device; needs deepspeed.

    Follows ``ray.train.lightning.RayDeepSpeedStrategy``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.lightning.RayDeepSpeedStrategy.html

    Examples
    --------
    >>> strategy = RayDeepSpeedStrategy(stage=3)  # doctest: +SKIP
    """


class RayLightningEnvironment(LightningEnvironment):
    """Reports to Lightning which rank this process is; the ranks exist already.

    Follows ``ray.train.lightning.RayLightningEnvironment``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.lightning.RayLightningEnvironment.html

    Examples
    --------
    >>> trainer = pl.Trainer(plugins=[RayLightningEnvironment()])  # doctest: +SKIP
    """

    @property
    def creates_processes_externally(self) -> bool:
        """True: Lightning is not to start ranks."""
        return True

    def world_size(self) -> int:
        """Return the number of ranks."""
        return get_context().get_world_size()

    def set_world_size(self, size: int) -> None:
        """Do nothing: the run has a number of ranks."""

    def global_rank(self) -> int:
        """Return this rank's number among all ranks."""
        return get_context().get_world_rank()

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the run has numbered its ranks."""

    def local_rank(self) -> int:
        """Return this rank's number on its node."""
        return get_context().get_local_rank()

    def node_rank(self) -> int:
        """Return the number of this rank's node."""
        return get_context().get_node_rank()

    def teardown(self) -> None:
        """Do nothing: the variables belong to the run."""


class RayTrainReportCallback(pl.callbacks.Callback):
    """Reports the metrics and a checkpoint at the end of each training epoch.

    Make it in the training function, on every rank.

    Follows ``ray.train.lightning.RayTrainReportCallback``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.lightning.RayTrainReportCallback.html

    Parameters
    ----------
    checkpoint_upload_mode : CheckpointUploadMode or str, optional
        Whether the checkpoint is uploaded in the background; by default ``SYNC``.
    validation : bool or ValidationTaskConfig, default False
        Whether the checkpoint is validated, as `distributor.train.report` documents.

    Attributes
    ----------
    CHECKPOINT_NAME : str
        The name of Lightning's file, or folder, in the checkpoint.
    tmpdir_prefix : str
        The beginning of the path of the folders that Lightning saves in until they are uploaded.

    Examples
    --------
    >>> def train_func():  # doctest: +SKIP
    ...     trainer = pl.Trainer(callbacks=[RayTrainReportCallback()], ...)
    ...     checkpoint = train.get_checkpoint()
    ...     with checkpoint.as_directory() if checkpoint else nullcontext() as folder:
    ...         path = f"{folder}/{RayTrainReportCallback.CHECKPOINT_NAME}" if folder else None
    ...         trainer.fit(model, ckpt_path=path)
    """

    CHECKPOINT_NAME = "checkpoint.ckpt"

    def __init__(
        self,
        checkpoint_upload_mode: CheckpointUploadMode | str | None = None,
        validation: bool | ValidationTaskConfig = False,
    ) -> None:
        super().__init__()
        self.validation = validation
        self.checkpoint_upload_mode = CheckpointUploadMode(checkpoint_upload_mode or "SYNC")
        run = os.environ.get("TORCHELASTIC_RUN_ID", os.getpid())
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        # The same on all ranks: a sharded strategy saves into the folder that rank 0 names.
        name = f"lightning_checkpoints-{run}-{attempt}-{get_context().get_experiment_name()}"
        self.tmpdir_prefix = os.path.join(tempfile.gettempdir(), name)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save a checkpoint, and report it with the metrics."""
        folder = private_folder(Path(f"{self.tmpdir_prefix}-{trainer.current_epoch}"))
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        trainer.save_checkpoint(folder / self.CHECKPOINT_NAME, weights_only=False)
        saved = any(folder.iterdir())
        report(
            metrics,
            checkpoint=Checkpoint.from_directory(folder) if saved else None,
            checkpoint_upload_mode=self.checkpoint_upload_mode,
            validation=self.validation if saved else False,
        )
        trainer.strategy.barrier()
        if self.checkpoint_upload_mode is not CheckpointUploadMode.ASYNC:
            shutil.rmtree(folder, ignore_errors=True)


def prepare_trainer(trainer: pl.Trainer) -> pl.Trainer:
    """Check that a trainer fits the ranks of a run, and return it.

    Follows ``ray.train.lightning.prepare_trainer``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.lightning.prepare_trainer.html

    Parameters
    ----------
    trainer : lightning.pytorch.Trainer
        The trainer.

    Returns
    -------
    lightning.pytorch.Trainer
        The same trainer.

    Raises
    ------
    RuntimeError
        If its strategy or its environment would start ranks of its own.

    Examples
    --------
    >>> trainer = prepare_trainer(pl.Trainer(strategy=RayDDPStrategy()))  # doctest: +SKIP
    """
    strategies = (RayDDPStrategy, RayFSDPStrategy, RayDeepSpeedStrategy)
    if not isinstance(trainer.strategy, strategies):
        names = ", ".join(each.__name__ for each in strategies)
        raise RuntimeError(
            f"The trainer's strategy is {type(trainer.strategy).__name__}, but must be one of "
            f"{names}: pl.Trainer(strategy=RayDDPStrategy())."
        )
    environment = trainer.strategy.cluster_environment
    if environment and not isinstance(environment, RayLightningEnvironment):
        raise RuntimeError(
            f"The trainer's cluster environment is {type(environment).__name__}, but must be "
            "RayLightningEnvironment: pl.Trainer(plugins=[RayLightningEnvironment()])."
        )
    return trainer
