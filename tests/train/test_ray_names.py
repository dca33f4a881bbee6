"""Names of ``ray.train`` that have no counterpart here, and those that old programs use."""

from __future__ import annotations

import importlib
import sys

import pytest

UNSUPPORTED = [
    ("tensorflow", "TensorflowTrainer"),
    ("xgboost", "XGBoostTrainer"),
    ("torch.xla", "TorchXLAConfig"),
    ("backend", "Backend"),
    ("v2.jax", "JaxTrainer"),
]


@pytest.mark.parametrize(("module", "name"), UNSUPPORTED)
def test_an_import_says_what_to_use_instead(module: str, name: str) -> None:
    top = module if module == "torch.xla" else module.partition(".")[0]
    for statement in (
        f"import distributor.train.{module}",
        f"from distributor.train.{module} import {name}",
    ):
        with pytest.raises(NotImplementedError, match=rf"^distributor\.train\.{top}: ") as refused:
            exec(statement)
        assert any(word in str(refused.value) for word in ("distributor.", ".spark.", "synapse"))
    assert f"distributor.train.{module}" not in sys.modules


@pytest.mark.parametrize("package", ["air", "serverless_gpu"])
def test_the_files_of_a_folder_are_refused(package: str) -> None:
    error = rf"distributor\.{package}\.data: files of a folder are not divided(.|\n)*from_parquet"
    with pytest.raises(NotImplementedError, match=error):
        importlib.import_module(f"distributor.{package}.data")
