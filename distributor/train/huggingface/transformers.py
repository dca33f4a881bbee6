"""The Trainer of Transformers, under the names of ``ray.train.huggingface.transformers``."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from distributor.data.batches import Batches
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


class _BatchReader:
    """The methods of a trainer that reads batches of shards."""

    train_dataset: Any
    eval_dataset: Any

    def get_train_dataloader(self) -> Any:
        """Return the training data."""
        if isinstance(self.train_dataset, Batches):
            return _loader_of(self.train_dataset)
        return super().get_train_dataloader()  # type: ignore[misc]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the data of an evaluation."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        if isinstance(dataset, Batches):
            return _loader_of(dataset)
        return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]


class _Stream(IterableDataset[Any]):
    """Batches as a dataset of PyTorch, which the trainer's checks know."""

    def __init__(self, batches: Batches[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def _loader_of(batches: Batches[Any]) -> DataLoader[Any]:
    return DataLoader(_Stream(batches), batch_size=None)


def prepare_trainer(trainer: T) -> T:
    """Let a trainer read the batches of this rank's shards.

    If its ``train_dataset`` or ``eval_dataset`` is what `DatasetShard.iter_torch_batches` returns,
    each rank trains on, or evaluates, the batches of its own share. A run that resumes reads the
    rest of the epoch from the shard's position in the checkpoint; the trainer skips no batches
    (``ignore_data_skip``). Other datasets are left to the trainer.

    Follows ``ray.train.huggingface.transformers.prepare_trainer``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.huggingface.transformers.prepare_trainer.html

    Parameters
    ----------
    trainer : transformers.Trainer
        The trainer. Batches have no length, so its ``max_steps`` must be set.

    Returns
    -------
    transformers.Trainer
        The same trainer.

    Examples
    --------
    >>> def train_func():  # doctest: +SKIP
    ...     batches = train.get_dataset_shard("train").iter_torch_batches(batch_size=16)
    ...     trainer = transformers.Trainer(model, arguments, train_dataset=batches)
    ...     prepare_trainer(trainer).train()
    """
    reader: Any = trainer
    evaluated = reader.eval_dataset
    given = [
        reader.train_dataset,
        *(evaluated.values() if type(evaluated) is dict else [evaluated]),
    ]
    if any(isinstance(dataset, Batches) for dataset in given):
        kind = type(reader)
        reader.__class__ = type(kind.__name__, (_BatchReader, kind), {})
        reader.args.ignore_data_skip |= isinstance(reader.train_dataset, Batches)
    return trainer
