"""Names of ``ray.train`` that have no counterpart here, and those that old programs use."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distributor import train
from distributor.train.torch import TorchCheckpoint

UNSUPPORTED = [
    ("tensorflow", "TensorflowTrainer"),
    ("xgboost", "XGBoostTrainer"),
    ("lightgbm", "LightGBMTrainer"),
    ("horovod", "HorovodTrainer"),
    ("jax", "JaxTrainer"),
    ("torch.xla", "TorchXLAConfig"),
    ("backend", "Backend"),
    ("base_trainer", "BaseTrainer"),
    ("data_parallel_trainer", "DataParallelTrainer"),
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
def test_the_files_of_a_folder_are_refused_in_a_process_of_their_own(package: str) -> None:
    code = f"import distributor.{package}.data"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    says = f"NotImplementedError: distributor.{package}.data: files of a folder are not divided"
    assert says in done.stderr
    assert "from_parquet" in done.stderr
    assert "prepare_data_loader" in done.stderr


def test_other_modules_are_missing_as_usual() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"distributor\.train\.nothing"):
        importlib.import_module("distributor.train.nothing")


RAY_TRAIN = """
get_checkpoint get_context get_dataset_shard report BackendConfig Checkpoint CheckpointConfig
DataConfig FailureConfig Result RunConfig ScalingConfig SyncConfig TrainContext
TrainingFailedError TRAIN_DATASET_KEY CheckpointUploadMode CheckpointConsistencyMode ControllerError
LoggingConfig PreemptionError PreemptionInfo ReportedCheckpoint
ReportedCheckpointStatus UserCallback WorkerGroupError
get_all_reported_checkpoints get_preemption_info
"""
RAY_TRAIN_TORCH = """
TorchTrainer TorchCheckpoint TorchConfig accelerate get_device get_devices prepare_model
prepare_optimizer prepare_data_loader backward enable_reproducibility
"""


def test_all_names_exist() -> None:
    assert set(RAY_TRAIN.split()) <= set(train.__all__)
    assert set(train.__all__) <= set(dir(train))
    module = importlib.import_module("distributor.train.torch")
    assert set(RAY_TRAIN_TORCH.split()) == set(module.__all__)


DEPRECATED = "TorchCheckpoint is deprecated in Ray Train too"


def test_a_checkpoint_with_a_model(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    with pytest.warns(DeprecationWarning, match=DEPRECATED):
        checkpoint = TorchCheckpoint.from_state_dict(state)
    with pytest.warns(DeprecationWarning, match=DEPRECATED):
        whole = TorchCheckpoint.from_model(model)
    loaded = checkpoint.get_model(torch.nn.Linear(2, 1))
    assert torch.equal(loaded.weight, model.weight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass the model to load it into"):
        checkpoint.get_model()
    assert torch.equal(whole.get_model().weight, model.weight)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="model is ignored"):
        whole.get_model(model)
    with pytest.warns(DeprecationWarning, match=DEPRECATED):
        other = TorchCheckpoint(tmp_path)
    with pytest.raises(RuntimeError, match=r"has no model\.pt"):
        other.get_model()
