"""The Trainer of Transformers, under the names of ``ray.train.huggingface.transformers``."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from distributor.train import Checkpoint, collective, report

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["RayTrainReportCallback", "prepare_trainer"]

T = TypeVar("T")


class RayTrainReportCallback(TrainerCallback):
    """Reports the metrics and the checkpoint each time the trainer saves one.

    Follows ``ray.train.huggingface.transformers.RayTrainReportCallback``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.huggingface.transformers.RayTrainReportCallback.html

    Attributes
    ----------
    CHECKPOINT_NAME : str
        The folder of the trainer's files in the checkpoint.

    Examples
    --------
    >>> def train_func():  # doctest: +SKIP
    ...     trainer = transformers.Trainer(...)
    ...     trainer.add_callback(RayTrainReportCallback())
    ...     prepare_trainer(trainer).train()
    """

    CHECKPOINT_NAME = "checkpoint"

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Report the checkpoint that the trainer has just saved."""
        metrics = {name: value for logged in state.log_history for name, value in logged.items()}
        collective.barrier()  # another rank may still be writing into the same folder
        source = Path(args.output_dir or "", f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if not source.is_dir():  # on a host whose ranks save nothing
            return report(metrics)
        with tempfile.TemporaryDirectory(prefix=".report-", dir=source.parent) as folder:
            shutil.copytree(source, Path(folder, self.CHECKPOINT_NAME), copy_function=_link)
            report(metrics, checkpoint=Checkpoint.from_directory(folder))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no hard links
        shutil.copy2(source, target)


def prepare_trainer(trainer: T) -> T:
    """Return the trainer, which needs no preparation here.

    Ray's function gives it the data of Ray Data.

    Follows ``ray.train.huggingface.transformers.prepare_trainer``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.huggingface.transformers.prepare_trainer.html

    Parameters
    ----------
    trainer : transformers.Trainer
        The trainer.

    Returns
    -------
    transformers.Trainer
        The same trainer.

    Examples
    --------
    >>> trainer = prepare_trainer(transformers.Trainer(...))  # doctest: +SKIP
    """
    return trainer
