"""The Trainer of Transformers, under the names of ``ray.train.huggingface.transformers``."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

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
        """Report the checkpoint that the trainer has saved last."""
        metrics = {name: value for logged in state.log_history for name, value in logged.items()}
        collective.barrier()  # another rank may still be writing into the same folder
        source = _last_checkpoint(args.output_dir)
        with tempfile.TemporaryDirectory() as folder:
            if source is not None:
                shutil.copytree(source, Path(folder, self.CHECKPOINT_NAME))
            checkpoint = None if source is None else Checkpoint.from_directory(folder)
            report(metrics, checkpoint=checkpoint)


def _last_checkpoint(folder: str | None) -> str | None:
    try:
        found: str | None = get_last_checkpoint(folder)  # type: ignore[no-untyped-call]
    except FileNotFoundError:  # on a host whose ranks save nothing
        return None
    return found


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
