"""Refuses ``ray.train.v2``, by name."""

raise NotImplementedError(
    "distributor.train.v2: its modules are internal to Ray. The names of Ray Train v2 are in "
    "distributor.train and distributor.train.torch."
)
