"""What is predicted for a loss function, and the module that predicts in Spark's Python workers."""

from __future__ import annotations

import functools
import inspect
import io
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWriter
from torch.nn import functional

from distributor._compat import pyspark as private
from distributor._compat.pyspark import is_connect_session
from distributor.errors import UnpicklableError
from distributor.filesystems import native, resolve
from distributor.serialization import code_pickle
from distributor.serialization.pickle_diagnostics import explain_parts


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
    while isinstance(loss, functools.partial):
        loss = loss.func
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


FILE = "torch.pt"
T = TypeVar("T", bound="MLReadable[Any]")


class StageWriter(MLWriter):
    """Saves the Params of a stage as Spark does, and its parts by torch."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self.instance = instance

    def saveImpl(self, path: str) -> None:
        parts = self.instance.parts()
        file = io.BytesIO()
        try:
            torch.save(parts, file, pickle_module=code_pickle)
        except Exception as error:
            raise UnpicklableError(explain_parts(parts) or str(error)) from error
        DefaultParamsWriter.saveMetadata(self.instance, path, _context(self.sparkSession))
        filesystem, target = _file_in(self.sparkSession, path)
        with filesystem.open_output_stream(target) as stream:
            stream.write(file.getbuffer())


class StageReader(MLReader[T]):
    """Loads what a `StageWriter` has saved."""

    def __init__(self, kind: type[T]) -> None:
        super().__init__()
        self.kind = kind

    def load(self, path: str) -> T:
        name = f"{self.kind.__module__}.{self.kind.__name__}"
        context = _context(self.sparkSession)
        metadata = DefaultParamsReader.loadMetadata(path, context, expectedClassName=name)
        filesystem, source = _file_in(self.sparkSession, path)
        with filesystem.open_input_file(source) as file:
            parts = torch.load(file, map_location="cpu", weights_only=False)
        instance = self.kind(**parts)
        private.reset_uid(instance, metadata["uid"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
        return instance


def _context(spark: Any) -> Any:
    # PySpark 3.5 reads and writes metadata with the context, which Connect does not have.
    return spark if is_connect_session(spark) else spark.sparkContext


def _file_in(spark: Any, path: str) -> tuple[Any, Any]:
    """Return the file system of a stage's folder, which Spark's configuration chooses, and a file.

    Through Connect it is the one that the path names on this machine.
    """
    address = path if is_connect_session(spark) else private.qualified(spark.sparkContext, path)
    filesystem, folder = resolve(address)
    return filesystem, native(filesystem, f"{folder}/{FILE}")
