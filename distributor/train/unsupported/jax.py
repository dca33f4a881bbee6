"""Refuses ``ray.train.jax``, by name."""

raise NotImplementedError(
    "distributor.train.jax: only PyTorch is supported. Port the model to PyTorch, or start "
    "JAX in the processes of distributor.TorchDistributor with jax.distributed.initialize."
)
