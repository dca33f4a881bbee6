"""``@ray_launch``: runs a function as the driver of a Ray cluster that lasts as long as the run.

`launch` is the driver's part. A rank's part is in `program`, which starts a Ray node (`node`) and
exchanges addresses with the other nodes (`peers`).
"""

from distributor.ray.launch import RayFunction, ray_launch, require_ray

__all__ = ["RayFunction", "ray_launch", "require_ray"]
