"""What the ranks of a `TorchEstimator` run, and the module that Spark's Python workers run."""

from __future__ import annotations

import contextlib
import inspect
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from distributor import runtime, train
from distributor.serialization.code_search import without_partials
from distributor.train import TRAIN_DATASET_KEY, get_dataset_shard
from distributor.train.config import TorchConfig
from distributor.train.runtime.session import session
from distributor.train.storage.checkpoint import Checkpoint
from distributor.train.torch import prepare_model
from distributor.train.worker_loop import loop_arguments, process_group

if TYPE_CHECKING:
    from distributor.data.shard import DatasetShard

FILE = "module.pt"
"""The file of a checkpoint: the states of the module and of the optimizer, and the epoch."""


ADVICE = {
    r"Drop their rows, or say what replaces them, as in fill=.*": (
        "Drop their rows (df.dropna), or replace them (df.fillna)."
    ),
    r"Pass ragged=.*": "Make them as long in the DataFrame, or pass a function that reads the rows "
    "as it likes: train=...",
}
"""What an estimator's user can do, by the advice of the loader that it has no argument for."""


def most_likely_class(output: torch.Tensor) -> torch.Tensor:
    """Return the index of the largest number of each row."""
    return output.argmax(dim=1)


def single_number(output: torch.Tensor) -> torch.Tensor:
    """Return the module's output, which is the prediction."""
    return output


def is_positive(output: torch.Tensor) -> torch.Tensor:
    """Return the class, 0 or 1, of a logit."""
    return output > 0


def is_likely(output: torch.Tensor) -> torch.Tensor:
    """Return the class, 0 or 1, of a probability."""
    return output > 0.5


def softmax(output: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of classes, of which each row has the logits."""
    return output.softmax(dim=1)


def sigmoid_of_both(output: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of the classes 0 and 1, of the logit of class 1."""
    return torch.stack([(-output).sigmoid(), output.sigmoid()], dim=-1)


def both(output: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of the classes 0 and 1, of that of class 1."""
    return torch.stack([1 - output, output], dim=-1)


class Meaning(NamedTuple):
    """What the output of a module means, by the loss that has trained it."""

    predict: Callable[[Any], torch.Tensor] = single_number
    probability: Callable[[Any], torch.Tensor] | None = None

    @property
    def is_class(self) -> bool:
        """Whether the targets are indices of classes."""
        return self.predict is most_likely_class


_MEANINGS: dict[Any, Meaning] = {
    torch.nn.CrossEntropyLoss: Meaning(most_likely_class, softmax),
    torch.nn.NLLLoss: Meaning(most_likely_class, torch.exp),
    torch.nn.BCEWithLogitsLoss: Meaning(is_positive, sigmoid_of_both),
    torch.nn.BCELoss: Meaning(is_likely, both),
    functional.cross_entropy: Meaning(most_likely_class, softmax),
    functional.nll_loss: Meaning(most_likely_class, torch.exp),
    functional.binary_cross_entropy_with_logits: Meaning(is_positive, sigmoid_of_both),
    functional.binary_cross_entropy: Meaning(is_likely, both),
}


def meaning_for(loss: Any) -> Meaning:
    """Return what the output of a module means that is trained with a loss function."""
    loss = without_partials(loss)
    kinds = [loss] if inspect.isfunction(loss) else type(loss).__mro__
    return next((_MEANINGS[kind] for kind in kinds if kind in _MEANINGS), Meaning())


class Predictor(torch.nn.Module):
    """A trained module, followed by the functions that make columns of its outputs.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    meaning : Meaning
        The functions.
    prediction : str
        The name of the column of predictions, one number for each row.
    probability : str or None
        That of the column of probabilities, a vector for each row.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        meaning: Meaning,
        prediction: str,
        probability: str | None,
    ) -> None:
        super().__init__()
        self.module = module
        self.meaning = meaning
        self.prediction = prediction
        self.probability = probability

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        output, rows = self.module(features), len(features)
        found = torch.as_tensor(self.meaning.predict(output))
        if found.numel() != rows:
            raise ValueError(
                f"The predictions of {rows} rows have the shape {tuple(found.shape)}, but a "
                "prediction is one number. Pass a function that makes it of the module's output: "
                "predict=lambda output: output.argmax(dim=1)."
            )
        columns = {self.prediction: found.reshape(rows).double()}
        if self.probability is not None:
            assert self.meaning.probability is not None, "the driver has checked it"
            probabilities = torch.as_tensor(self.meaning.probability(output))
            columns[self.probability] = probabilities.reshape(rows, -1).double()
        return columns


@dataclass(frozen=True)
class Training:
    """Calls the training function in a rank; rank 0 returns the trained module."""

    function: Callable[..., Any]  # takes `config`, or nothing
    config: Mapping[str, Any]

    @property
    def __name__(self) -> str:
        return "TorchEstimator"

    def __call__(self, dataset: DatasetShard) -> torch.nn.Module | None:
        session.dataset_shards = {TRAIN_DATASET_KEY: dataset}
        with process_group(TorchConfig()):
            module = self.function(*loop_arguments(self.function, self.config))
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                module = module.module
        if runtime.get_global_rank():
            return None
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                "train must return the trained module on rank 0, a torch.nn.Module, but has "
                f"returned an object of type {type(module).__name__}."
            )
        return module.cpu()


@dataclass(frozen=True)
class ModuleLoop:
    """Trains a module with a loss function and an optimizer, and saves each epoch if it can."""

    module: torch.nn.Module | Callable[[], torch.nn.Module]
    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    dtypes: Mapping[str, torch.dtype]
    has_storage: bool
    has_predict: bool
    find_unused_parameters: bool

    def __call__(self, config: Mapping[str, Any]) -> torch.nn.Module:
        features, label, seed = config["featuresCol"], config["labelCol"], config["seed"]
        torch.manual_seed(seed)
        module = self.module if isinstance(self.module, torch.nn.Module) else self.module()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                "module must return a torch.nn.Module, but has returned an object of type "
                f"{type(module).__name__}."
            )
        options = {"find_unused_parameters": self.find_unused_parameters}
        model = prepare_model(module, parallel_strategy_kwargs=options).train()
        rate = {} if config["stepSize"] is None else {"lr": config["stepSize"]}
        optimizer = self.optimizer(model.parameters(), **rate)
        first = self._resume(module, optimizer)
        with _advice_for_estimators():
            batches = get_dataset_shard().iter_torch_batches(
                batch_size=config["batchSize"],
                dtypes=self.dtypes,
                shuffle=True,
                seed=seed,
            )
        for epoch in range(first, config["maxIter"]):
            # Of dropout: another on each rank, and the same after a failure.
            torch.manual_seed(seed + epoch * runtime.get_world_size() + runtime.get_global_rank())
            for batch in _whole_batches(batches, label, config["batchSize"]):
                output = model(batch[features])
                loss = self.loss(output, self._target(batch[label], output, label))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            runtime.progress(epoch + 1, config["maxIter"], loss=loss.detach())
            if self.has_storage:
                _save(module, optimizer, epoch, loss.item())
        return model

    def _resume(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Load the latest checkpoint, and return the first epoch that is not in it."""
        checkpoint = train.get_checkpoint() if self.has_storage else None
        if checkpoint is None:
            return 0
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/{FILE}", map_location="cpu", weights_only=False)
        module.load_state_dict(saved["module"])
        optimizer.load_state_dict(saved["optimizer"])
        return int(saved["epoch"]) + 1

    def _target(self, labels: torch.Tensor, output: Any, name: str) -> torch.Tensor:
        if meaning_for(self.loss).is_class:
            target = labels.long()
            if not torch.equal(target, labels):
                raise ValueError(f"Column {name!r} has labels that are no indices of classes.")
            return target
        if not isinstance(output, torch.Tensor):
            return labels.float()
        if output.numel() != labels.numel():
            # Losses of torch would broadcast such labels; a function of the user's knows better.
            if self.has_predict and inspect.isfunction(self.loss):
                return labels
            raise ValueError(
                f"The module has returned a tensor of shape {tuple(output.shape)} for "
                f"{len(labels)} labels of column {name!r}. For classes, pass "
                "loss=torch.nn.CrossEntropyLoss(). With a loss function of your own, which gets "
                "the labels as they are, pass also what the prediction is: "
                "predict=lambda output: output.argmax(dim=1)."
            )
        return labels.to(output.dtype).view_as(output)


@contextlib.contextmanager
def _advice_for_estimators() -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        text = str(error)
        for advice, own in ADVICE.items():
            text = re.sub(advice, own, text)
        raise type(error)(text) from None


def _whole_batches(batches: Iterable[Any], label: str, batch_size: int) -> Iterator[Any]:
    """Join a last batch of one row, of which BatchNorm can compute no variance, to the one before.

    All ranks have as many rows.
    """
    waiting = None
    with _advice_for_estimators():
        for batch in batches:
            if waiting is not None and len(batch[label]) == 1 < batch_size:
                batch = {name: torch.cat([waiting[name], batch[name]]) for name in batch}
            elif waiting is not None:
                yield waiting
            waiting = batch
    if waiting is not None:
        yield waiting


def _save(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, epoch: int, loss: float
) -> None:
    metrics = {"epoch": epoch, "loss": loss}
    if runtime.get_global_rank():
        train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        states = {"module": module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**states, "epoch": epoch}, f"{folder}/{FILE}")
        train.report(metrics, Checkpoint.from_directory(folder))
