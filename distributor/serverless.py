"""``@distributed``: runs a decorated function on all ranks when ``.distributed()`` is called."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar, overload

from distributor.core.cell_errors import ends_at_caller
from distributor.core.gpus import GPUType
from distributor.core.spelling import Spelling, check_names
from distributor.decorated_function import DistributedFunction, Launcher, decorator_of
from distributor.run.settings import Settings
from distributor.screen.messages import warn
from distributor.settings.fields import documented
from distributor.settings.types import check_bool, check_gpu_type
from distributor.spark.plan import driver_gpus
from distributor.spark.session import Session
from distributor.torch_distributor import TorchDistributor

P = ParamSpec("P")
R = TypeVar("R")

POOL_VARIABLE = "DISTRIBUTOR_POOL"
POOL_ID_VARIABLE = "DATABRICKS_REMOTE_GPU_POOL_ID"
RESERVED_VARIABLE = "DATABRICKS_USE_RESERVED_GPU_POOL"
POOLS = {True: "reserved", False: "on-demand"}
"""The pool for each value of the last variable, as defined in conf/fairscheduler.xml."""
_SWITCHES = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@overload
def distributed(gpus: Callable[P, R]) -> DistributedFunction[P, R]: ...


@overload
def distributed(
    gpus: int | None = None,
    gpu_type: GPUType | str | None = None,
    remote: bool = False,
    *,
    num_accelerators: int | None = None,
    accelerator_type: str | None = None,
    use_gpu: bool = True,
    run_async: bool = False,
    **settings: Any,
) -> Callable[[Callable[P, R]], DistributedFunction[P, R]]: ...


@documented(Settings, skip=["gpu_type"])
def distributed(
    gpus: Any = None,
    gpu_type: GPUType | str | None = None,
    remote: bool = False,
    *,
    num_accelerators: int | None = None,
    accelerator_type: str | None = None,
    use_gpu: bool = True,
    run_async: bool = False,
    **settings: Any,
) -> Any:
    """Decorate a function so that it can run on many ranks.

    The decorator follows ``serverless_gpu.distributed`` of Databricks:
    https://docs.databricks.com/aws/en/machine-learning/ai-runtime/distributed-training.

    Parameters
    ----------
    gpus : int, optional
        Number of ranks, each with a GPU; with ``use_gpu=False`` the number of ranks. By default
        it is the number of GPUs of this machine.
    gpu_type : GPUType or str, optional
        Required type of the GPUs, such as "A10", in upper or lower case.
    remote : bool, default False
        Whether ranks run on the executors of the active Spark session instead of this machine.
    num_accelerators : int, optional
        The newer name of `gpus`.
    accelerator_type : str, optional
        The newer name of `gpu_type`. "GPU_8xH100" includes the number of GPUs of a node, which is
        the number of ranks if none is given.
    use_gpu : bool, default True
        Whether each rank has a GPU. If False, GPUs are hidden from ranks and `gpu_type` is not
        compared with them.
    run_async : bool, default False
        Whether ``.distributed()`` returns a future at once, as ``.distributed_async()`` does.
    **settings
        Settings of `TorchDistributor`, listed below. The default of `pool` is the variable
        DISTRIBUTOR_POOL or DATABRICKS_REMOTE_GPU_POOL_ID or, if DATABRICKS_USE_RESERVED_GPU_POOL is
        set, "reserved" or "on-demand".

    Other Parameters
    ----------------
    {settings}

    Returns
    -------
    callable
        The decorator, which returns a `DistributedFunction`. Values are checked at each run,
        because a module may be imported where they are not valid.

    Raises
    ------
    TypeError
        If an argument is unknown, or both names of one argument are given.

    Examples
    --------
    >>> @distributed(gpus=2, use_gpu=False)
    ... def square_of_rank():
    ...     from distributor import runtime
    ...     return runtime.get_global_rank() ** 2
    >>> square_of_rank.distributed()
    [0, 1]
    """
    if callable(gpus):  # @distributed, without parentheses
        return distributed()(gpus)
    launcher = launcher_of(
        "@distributed",
        gpus=gpus,
        gpu_type=gpu_type,
        remote=remote,
        num_accelerators=num_accelerators,
        accelerator_type=accelerator_type,
        use_gpu=use_gpu,
        run_async=run_async,
        settings=settings,
    )
    return decorator_of(DistributedFunction, "@distributed", launcher, run_async)


@ends_at_caller
def launcher_of(
    api: str,
    *,
    gpus: int | None,
    gpu_type: GPUType | str | None,
    remote: bool,
    num_accelerators: int | None,
    accelerator_type: str | None,
    use_gpu: bool,
    run_async: bool,
    settings: Mapping[str, Any],
) -> Launcher:
    """Return what creates the distributor of a run, for a decorator's arguments."""
    own = inspect.signature(distributed).parameters.keys() - {"settings"}
    check_names(api, settings, {*own, *_SETTINGS})
    count = _one_of("gpus", gpus, "num_accelerators", num_accelerators)
    type_ = _one_of("gpu_type", gpu_type, "accelerator_type", accelerator_type)
    of_node, kind = _split(type_)

    type_name = "gpu_type" if accelerator_type is None else "accelerator_type"
    is_newer = num_accelerators is not None or (gpus is None and accelerator_type is not None)
    name = "num_accelerators" if is_newer else "gpus"
    if count is None and of_node is not None:
        name = f"the number of GPUs in {type_name}={type_!r}"

    class Distributor(TorchDistributor):
        spelling = Spelling(api, name, "pass remote=False", gpu_type=type_name)

    def launcher() -> TorchDistributor:
        switches = {"remote": remote, "use_gpu": use_gpu, "run_async": run_async}
        for each, value in switches.items():
            check_bool(each, value)
        check_gpu_type(type_name, kind)
        return Distributor(
            _ranks(name, of_node if count is None else count, remote, use_gpu),
            local_mode=not remote,
            use_gpu=use_gpu,
            gpu_type=kind,
            **{"pool": _pool() if remote else None, **settings},
        )

    return launcher


_SETTINGS = {field.name for field in fields(Settings)} - {"gpu_type"}
_ACCELERATOR = re.compile(r"(?:GPU_)?(\d+)x(\w+)", re.IGNORECASE)


def _one_of(name: str, value: Any, newer: str, newer_value: Any) -> Any:
    if value is not None and newer_value is not None:
        raise TypeError(f"{name} and {newer} are two names of one argument: pass only one of them.")
    return value if newer_value is None else newer_value


def _split(gpu_type: Any) -> tuple[int | None, Any]:
    """Split "GPU_8xH100" into the number of GPUs of a node and their type."""
    found = _ACCELERATOR.fullmatch(gpu_type) if isinstance(gpu_type, str) else None
    return (int(found[1]), found[2]) if found else (None, gpu_type)


def _ranks(name: str, wanted: int | None, remote: bool, use_gpu: bool) -> Any:
    """Return the number of ranks."""
    if wanted is None and (remote or not use_gpu):
        raise ValueError(
            f"{name}, the number of ranks, is missing. It is optional only on this machine's GPUs "
            "(remote=False, use_gpu=True), and then all of them are used."
        )
    if remote or not use_gpu:
        return wanted
    there = len(driver_gpus(Session.active()))
    if wanted is not None and isinstance(wanted, int) and wanted > there > 0:
        raise ValueError(
            f"{name} is {wanted}, but this machine has {there}. Request fewer, or use the GPUs of "
            "the Spark cluster with remote=True."
        )
    return max(there, 1) if wanted is None else wanted


def _pool() -> str | None:
    """Return the pool that the variables name; those of Databricks only if Spark has pools."""
    variables = (POOL_VARIABLE, POOL_ID_VARIABLE, RESERVED_VARIABLE)
    given = next(((name, text) for name in variables if (text := os.environ.get(name))), None)
    if given is None:
        return None
    variable, pool = given
    if variable == RESERVED_VARIABLE:
        pool = _reserved_or_not(pool.strip())
    session = Session.active()
    if session is None or not (why := session.why_no_pools()):
        return pool
    if variable == POOL_VARIABLE:
        raise RuntimeError(f"The environment variable {variable} is {pool!r}, but {why}.")
    warn(f"{variable} is ignored: {why}.")
    return None


def _reserved_or_not(text: str) -> str:
    if text.lower() not in _SWITCHES:
        raise ValueError(
            f"The environment variable {RESERVED_VARIABLE} must be one of {', '.join(_SWITCHES)}, "
            f"but is {text!r}."
        )
    return POOLS[_SWITCHES[text.lower()]]
