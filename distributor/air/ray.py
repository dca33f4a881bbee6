"""Ray on this machine or on a cluster, under the names of ``databricks.air.ray``."""

from __future__ import annotations

from typing import Any

from distributor.ray import ray_launch, require_ray

__all__ = ["ray_init", "ray_launch"]


def ray_init(*args: Any, **kwargs: Any) -> Any:
    """Start Ray on this machine, or connect to a cluster, and show the dashboard's address.

    Follows ``databricks.air.ray_init``: https://pypi.org/project/databricks-sdk-air.

    Parameters
    ----------
    *args, **kwargs
        As for `ray.init <https://docs.ray.io/en/latest/ray-core/api/doc/ray.init.html>`_.

    Returns
    -------
    ray.BaseContext
        What ``ray.init`` returns.

    Raises
    ------
    ImportError
        If Ray is not installed.

    Examples
    --------
    >>> ray_init(num_cpus=2)  # doctest: +SKIP
    """
    require_ray()
    import ray

    context = ray.init(*args, **kwargs)
    if url := context.dashboard_url:
        print(f"Ray's dashboard: http://{url}")
    return context
