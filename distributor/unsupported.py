"""Modules of other packages without a counterpart here: importing one says what to use instead."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_FILES = (
    "files of a folder are not divided among ranks. Pass rows as an argument of the function: a "
    "DataFrame, or distributor.data.from_parquet(path). For other files, use torch's Dataset and "
    "DataLoader with distributor.train.torch.prepare_data_loader."
)
TUNE_INSTEAD = (
    "Ray Tune's API is not supported. Write the search space as a function of a trial of Optuna, "
    "and run the trials with distributor.tune.optimize(study, train, space, distributor)."
)
INSTEAD = {
    **{
        f"distributor.tune.{name}": TUNE_INSTEAD
        for name in ("integration", "schedulers", "search", "stopper", "tuner")
    },
    "distributor.air.data": _FILES,
    "distributor.serverless_gpu.data": _FILES,
    "distributor.train.backend": (
        "backends of Ray Train are not supported. TorchTrainer provides torch's process group; "
        "TorchDistributor starts processes without one, for any other framework."
    ),
    "distributor.train.base_trainer": (
        "BaseTrainer is not supported. Use distributor.train.torch.TorchTrainer."
    ),
    "distributor.train.data_parallel_trainer": (
        "DataParallelTrainer is not supported. Use distributor.train.torch.TorchTrainer, or "
        "TorchDistributor for ranks without a process group."
    ),
    "distributor.train.horovod": (
        "Horovod is not supported. Use DistributedDataParallel: "
        "distributor.train.torch.TorchTrainer, and prepare_model in the training function."
    ),
    "distributor.train.jax": (
        "only PyTorch is supported. Port the model to PyTorch, or start JAX in the processes of"
        " distributor.TorchDistributor with jax.distributed.initialize."
    ),
    "distributor.train.lightgbm": (
        "only PyTorch is supported. LightGBM trains on Spark DataFrames by SynapseML: "
        "synapse.ml.lightgbm.LightGBMClassifier and LightGBMRegressor."
    ),
    "distributor.train.tensorflow": (
        "only PyTorch is supported. Port the model to PyTorch, or run TensorFlow's own "
        "distribution strategies on Spark with spark-tensorflow-distributor."
    ),
    "distributor.train.v2": (
        "its modules are internal to Ray. The names of Ray Train v2 are in distributor.train "
        "and distributor.train.torch."
    ),
    "distributor.train.xgboost": (
        "only PyTorch is supported. XGBoost trains on Spark DataFrames by itself: "
        "xgboost.spark.SparkXGBClassifier, SparkXGBRegressor and SparkXGBRanker."
    ),
    "distributor.train.torch.xla": (
        "TPUs and Trainium are not supported. Train on GPUs or CPUs, with "
        "distributor.train.torch.TorchConfig."
    ),
}


class _Refusing(MetaPathFinder, Loader):
    """Finds the modules under the names that a program has imported, and refuses them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in INSTEAD else None

    def exec_module(self, module: ModuleType) -> None:
        raise NotImplementedError(f"{module.__name__}: {INSTEAD[module.__name__]}")


_FINDER = _Refusing()


def refuse_modules() -> None:
    """Let imports of these modules raise NotImplementedError."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
