"""Whether a program mentions a package, found without running it."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from distributor.programs import program_of
from distributor.serialization.code_search import imports_in_source


def imports_inside() -> None:
    import mlflow

    mlflow.log_metric("loss", 1.0)


def calls_another() -> None:
    imports_inside()


def names_a_logger() -> Any:
    from lightning.pytorch.loggers import MLFlowLogger

    return MLFlowLogger("exp")


def takes(*args: object) -> None:
    pass


@pytest.fixture(autouse=True)
def by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickle this module's functions as those of a notebook."""
    for function in (imports_inside, calls_another, names_a_logger, takes):
        monkeypatch.setattr(function, "__module__", "__main__")


@pytest.mark.parametrize(
    ("function", "args", "mentions_it"),
    [
        (calls_another, (), True),
        (names_a_logger, (), True),
        (functools.partial(takes, imports_inside), (), True),
        (takes, ({"report_to": "mlflow"},), True),
        (takes, ([0.0] * 1000,), False),
    ],
)
def test_functions_that_mention_a_package_are_found(
    function: Callable[..., None], args: tuple[Any, ...], mentions_it: bool
) -> None:
    assert program_of(function, args, {}).mentions(b"mlflow") is mentions_it


@pytest.mark.parametrize(
    ("source", "mentions_it"), [("def log():\n    import mlflow", True), ("import torch", False)]
)
def test_scripts_that_mention_a_package_are_found(
    tmp_path: Path, source: str, mentions_it: bool
) -> None:
    (tmp_path / "train.py").write_text(source)
    assert program_of(str(tmp_path / "train.py"), (), {}).mentions(b"mlflow") is mentions_it


def test_threads_search_sources_at_the_same_time() -> None:
    source = Path(ast.__file__).read_bytes()
    run_python = lambda *_: sum(range(50))  # noqa: E731
    gc.callbacks.append(run_python)  # lets other threads continue inside `ast.parse`
    try:
        with ThreadPoolExecutor(3) as pool:
            found = set(pool.map(imports_in_source, [source] * 12))
    finally:
        gc.callbacks.remove(run_python)
    assert found == {imports_in_source(source)}
