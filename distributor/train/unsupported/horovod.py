"""Refuses ``ray.train.horovod``, by name."""

raise NotImplementedError(
    "distributor.train.horovod: Horovod is not supported. Use DistributedDataParallel: "
    "distributor.train.torch.TorchTrainer, and prepare_model in the training function."
)
