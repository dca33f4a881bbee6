"""Refuses ``ray.train.data_parallel_trainer``, by name."""

raise NotImplementedError(
    "distributor.train.data_parallel_trainer: DataParallelTrainer is not supported. Use "
    "distributor.train.torch.TorchTrainer, or TorchDistributor for ranks without a process "
    "group."
)
