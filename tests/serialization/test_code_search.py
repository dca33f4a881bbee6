"""Detecting that a program mentions a package, without running it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributor.serialization.code_search import call_mentions, script_mentions
from distributor.train.torch import TorchTrainer


def imports_inside() -> None:
    import mlflow

    mlflow.log_metric("loss", 1.0)


def calls_another() -> None:
    imports_inside()


def names_a_logger() -> Any:
    from lightning.pytorch.loggers import MLFlowLogger

    return MLFlowLogger("exp")


def passes_name_as_argument() -> dict[str, str]:
    return {"report_to": "mlflow"}


def nested() -> Callable[[], None]:
    def inner() -> None:
        imports_inside()

    return inner


class Training:
    """A callable with a method that logs."""

    def __call__(self) -> None:
        self.log()

    def log(self) -> None:
        imports_inside()


def mentions_only_in_text(path: str = "/somewhere/mlflow/data") -> int:
    """Mention mlflow only in text, without using it."""
    text = "what mlflow would log"
    return len(text) + len(path)


def takes_a_function(function: Callable[[], None]) -> None:
    function()


@pytest.mark.parametrize(
    "parts",
    [
        (imports_inside,),
        (calls_another,),
        (names_a_logger,),
        (passes_name_as_argument,),
        (nested(),),
        (Training(),),
        (Training().log,),
        (functools.partial(takes_a_function, imports_inside),),
        (takes_a_function, (imports_inside,), {}),
        (takes_a_function, (), {"function": calls_another}),
        (TorchTrainer(imports_inside)._checked_loop(),),
    ],
)
def test_functions_that_mention_the_package_are_found(parts: tuple[object, ...]) -> None:
    assert call_mentions("mlflow", *parts)


@pytest.mark.parametrize(
    "parts",
    [
        (mentions_only_in_text,),
        (print,),
        (functools.partial(mentions_only_in_text, path="mlflow"),),
        (mentions_only_in_text, ([0.0] * 100_000, {"a": types}), {}),
    ],
)
def test_functions_without_a_mention_are_not_found(parts: tuple[object, ...]) -> None:
    assert not call_mentions("mlflow", *parts)


@pytest.mark.parametrize(
    ("files", "mentions_it"),
    [
        ({"train.py": "import mlflow"}, True),
        ({"train.py": "def log():\n    from mlflow import log_metric"}, True),
        ({"train.py": "import helpers", "helpers.py": "import mlflow"}, True),
        (
            {"train.py": "from steps.log import log", "steps/log.py": "import mlflow.pytorch"},
            True,
        ),
        ({"train.py": "'''About mlflow.'''\nprint('mlflow is not used')"}, False),
        ({"train.py": "import other", "unused.py": "import mlflow"}, False),
        ({"train.py": "no python ("}, False),
    ],
)
def test_scripts_that_mention_the_package_are_found(
    tmp_path: Path, files: dict[str, str], mentions_it: bool
) -> None:
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    assert script_mentions("mlflow", tmp_path / "train.py") is mentions_it
