"""Refuses ``ray.train.tensorflow``, by name."""

raise NotImplementedError(
    "distributor.train.tensorflow: only PyTorch is supported. Port the model to PyTorch, or "
    "run TensorFlow's own distribution strategies on Spark with spark-tensorflow-distributor."
)
