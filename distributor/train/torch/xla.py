"""Refuses ``ray.train.torch.xla``, by name."""

raise NotImplementedError(
    "distributor.train.torch.xla: TPUs and Trainium are not supported. Train on GPUs or CPUs, with "
    "distributor.train.torch.TorchConfig."
)
