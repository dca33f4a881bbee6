"""What is predicted for a loss function, and the module that predicts in Spark's Python workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def most_likely_class(output: torch.Tensor) -> torch.Tensor:
    """Return the index of the largest number of each row."""
    return output.argmax(dim=1)


def single_number(output: torch.Tensor) -> torch.Tensor:
    """Return the module's output, which is the prediction."""
    return output


def takes_classes(loss: Any) -> bool:
    """Return whether the targets of a loss function are the indices of classes."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    functional = torch.nn.functional
    return isinstance(loss, (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)) or loss in (
        functional.cross_entropy,
        functional.nll_loss,
    )


def default_predict(loss: Any) -> Callable[[Any], torch.Tensor]:
    """Return what makes the predictions of the outputs of a module that a loss has trained."""
    return most_likely_class if takes_classes(loss) else single_number


class Predictor(torch.nn.Module):
    """A trained module, followed by the function that makes the predictions of its outputs."""

    def __init__(self, module: torch.nn.Module, predict: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module = module
        self.predict = predict

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        found = torch.as_tensor(self.predict(self.module(features)))
        if found.numel() != len(features):
            raise ValueError(
                f"The predictions of {len(features)} rows have the shape {tuple(found.shape)}, but "
                "a prediction is one number. Pass a function that makes it of the module's output: "
                "predict=lambda output: output.argmax(dim=1)."
            )
        return found.reshape(len(features)).double()
