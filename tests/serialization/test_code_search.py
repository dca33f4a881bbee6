"""Whether a program mentions a package, found without running it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from distributor.programs.programs import program_of


def imports_inside() -> None:
    import mlflow

    mlflow.log_metric("loss", 1.0)


def calls_another() -> None:
    imports_inside()


def passes_name_as_argument() -> dict[str, str]:
    return {"report_to": "mlflow"}


def mentions_only_in_text(path: str = "/somewhere/mlflow/data") -> int:
    """Mention mlflow only in text, without using it."""
    text = "what mlflow would log"
    return len(text) + len(path)


def takes_a_function(function: Callable[[], None]) -> None:
    function()


@pytest.mark.parametrize(
    ("function", "args", "mentions_it"),
    [
        (imports_inside,),
        (calls_another,),
        (passes_name_as_argument,),
        (functools.partial(takes_a_function, imports_inside),),
        (TorchTrainer(imports_inside)._checked_loop(),),
    ],
)
def test_functions_that_mention_the_package_are_found(parts: tuple[object, ...]) -> None:
    assert call_mentions("mlflow", *parts)


def test_functions_without_a_mention_are_not_found() -> None:
    assert not call_mentions("mlflow", mentions_only_in_text)
    assert not call_mentions("mlflow", mentions_only_in_text, ([0.0] * 100_000, {"a": types}), {})


def test_scripts_that_mention_the_package_are_found(tmp_path: Path) -> None:
    script, helper = tmp_path / "train.py", tmp_path / "helper.py"
    script.write_text("print('mlflow is not used')")
    helper.write_text("def log():\n    from mlflow import log_metric")
    assert not script_mentions("mlflow", script)
    script.write_text("from helper import log")
    assert script_mentions("mlflow", script)
