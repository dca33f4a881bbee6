"""What the ranks of a `TorchEstimator` run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from distributor import runtime
from distributor.ml.prediction import takes_classes
from distributor.train.config import TorchConfig
from distributor.train.datasets import TRAIN_DATASET_KEY, get_dataset_shard
from distributor.train.runtime.session import session
from distributor.train.torch import prepare_model
from distributor.train.worker_loop import loop_arguments, process_group

if TYPE_CHECKING:
    from distributor.data.shard import DatasetShard


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
    """Trains a module with a loss function and an optimizer."""

    module: torch.nn.Module | Callable[[], torch.nn.Module]
    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    dtypes: Mapping[str, torch.dtype]

    def __call__(self, config: Mapping[str, Any]) -> torch.nn.Module:
        features, label, seed = config["featuresCol"], config["labelCol"], config["seed"]
        torch.manual_seed(seed)
        module = self.module if isinstance(self.module, torch.nn.Module) else self.module()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                "module must return a torch.nn.Module, but has returned an object of type "
                f"{type(module).__name__}."
            )
        model = prepare_model(module).train()
        torch.manual_seed(seed + runtime.get_global_rank())  # of dropout, on each rank another
        rate = {} if config["stepSize"] is None else {"lr": config["stepSize"]}
        optimizer = self.optimizer(model.parameters(), **rate)
        batches = get_dataset_shard().iter_torch_batches(
            batch_size=config["batchSize"],
            dtypes=self.dtypes,
            shuffle=True,
            seed=seed,
        )
        for epoch in range(config["maxIter"]):
            for batch in batches:
                output = model(batch[features])
                loss = self.loss(output, self._target(batch[label], output, label))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            runtime.progress(epoch + 1, config["maxIter"], loss=loss.detach())
        return model

    def _target(self, labels: torch.Tensor, output: Any, name: str) -> torch.Tensor:
        if takes_classes(self.loss):
            target = labels.long()
            if not torch.equal(target, labels):
                raise ValueError(f"Column {name!r} has labels that are no indices of classes.")
            return target
        if not isinstance(output, torch.Tensor):
            return labels.float()
        if output.numel() != labels.numel():
            raise ValueError(
                f"The module has returned a tensor of shape {tuple(output.shape)} for "
                f"{len(labels)} labels of column {name!r}. Losses of several numbers for each row "
                "need train=..., or are those of classes: CrossEntropyLoss and NLLLoss."
            )
        return labels.to(output.dtype).view_as(output)
