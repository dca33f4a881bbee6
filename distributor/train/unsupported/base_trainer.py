"""Refuses ``ray.train.base_trainer``, by name."""

raise NotImplementedError(
    "distributor.train.base_trainer: BaseTrainer is not supported. Use "
    "distributor.train.torch.TorchTrainer."
)
