"""Refuses ``ray.train.backend``, by name."""

raise NotImplementedError(
    "distributor.train.backend: backends of Ray Train are not supported. TorchTrainer "
    "provides torch's process group; TorchDistributor starts processes without one, for any "
    "other framework."
)
