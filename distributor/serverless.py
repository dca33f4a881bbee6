"""``@distributed``: runs a decorated function on all ranks when ``.distributed()`` is called."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Generic, ParamSpec, TypeVar, overload

from distributor.core.gpus import GPUType
from distributor.launch.future import RunFuture
from distributor.launch.output.messages import warn
from distributor.launch.settings import Settings
from distributor.launch.spark.plan import driver_gpus
from distributor.launch.spark.session import Session
from distributor.torch_distributor import TorchDistributor

P = ParamSpec("P")
R = TypeVar("R")

POOL_VARIABLE = "DISTRIBUTOR_POOL"
RESERVED_VARIABLE = "DATABRICKS_USE_RESERVED_GPU_POOL"
POOLS = {True: "reserved", False: "on-demand"}
"""Pools for what that variable says, as conf/fairscheduler.xml has them."""


class DistributedFunction(Generic[P, R]):
    """A function that can run on many ranks; called plainly it runs once, here."""

    def __init__(
        self, function: Callable[P, R], launcher: Callable[[], TorchDistributor], run_async: bool
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._launcher = launcher
        self._run_async = run_async

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def distributed(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run on every rank, with the same arguments.

        Returns
        -------
        list
            What each rank returned, in the order of global ranks; with ``run_async`` a future of
            it, as `distributed_async` gives.

        Raises
        ------
        Exception
            What the failing rank raised, as `TorchDistributor.run` tells it.
        """
        if self._run_async:
            return self.distributed_async(*args, **kwargs)
        return self._launcher().run_all(self._function, *args, **kwargs)

    def distributed_async(self, *args: P.args, **kwargs: P.kwargs) -> RunFuture[list[R]]:
        """Begin to run on every rank; several runs may go on at once.

        Returns
        -------
        RunFuture
            A `concurrent.futures.Future` of what `distributed` returns; ``cancel()`` ends the run.
        """
        return self._launcher().submit_all(self._function, *args, **kwargs)


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
    """Make a function one that can run on many ranks, as ``serverless_gpu`` spells it.

    Parameters
    ----------
    gpus : int, optional
        How many ranks, each with a GPU; without `use_gpu` how many ranks. By default all GPUs of
        this machine.
    gpu_type : GPUType or str, optional
        What the GPUs have to be, such as "A10", in either case.
    remote : bool
        True: on the executors of the active Spark session. False: on this machine.
    num_accelerators, accelerator_type : int, str, optional
        The newer spelling of `gpus` and `gpu_type`; the type may tell a node's size with it, as
        "GPU_8xH100" does, which is then the number where none is given.
    use_gpu : bool
        False: ranks have no GPUs, and no type of GPU is looked for.
    run_async : bool
        Whether ``.distributed()`` gives a future at once, as ``.distributed_async()`` does.
    **settings
        As `TorchDistributor` takes them: env, timeout, pool and so on. By default `pool` is what
        the variable DISTRIBUTOR_POOL names; else, where DATABRICKS_USE_RESERVED_GPU_POOL is set,
        "reserved" or "on-demand".

    Returns
    -------
    callable
        The decorator. Everything is checked at each run, for it may be a module's first lines.

    Raises
    ------
    TypeError, ValueError
        For arguments that make no sense.

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
    _check_names(settings)
    count = _one_of("gpus", gpus, "num_accelerators", num_accelerators)
    wanted = _one_of("gpu_type", gpu_type, "accelerator_type", accelerator_type)
    of_node, wanted = _split(wanted)

    def launcher() -> TorchDistributor:
        return TorchDistributor(
            _ranks(of_node if count is None else count, remote, use_gpu),
            local_mode=not remote,
            use_gpu=use_gpu,
            gpu_type=wanted,
            **{"pool": _pool() if remote else None, **settings},
        )

    def decorate(function: Callable[P, R]) -> DistributedFunction[P, R]:
        if not callable(function):
            raise TypeError(f"@distributed decorates a function, but got {function!r}.")
        return DistributedFunction(function, launcher, run_async)

    return decorate


_SETTINGS = {field.name for field in fields(Settings)} - {"gpu_type"}
_ACCELERATOR = re.compile(r"(?:GPU_)?(\d+)x(\w+)", re.IGNORECASE)


def _check_names(settings: dict[str, Any]) -> None:
    if unknown := sorted(settings.keys() - _SETTINGS):
        raise TypeError(
            f"distributed does not know {', '.join(unknown)}. It takes gpus, gpu_type, remote, "
            "num_accelerators, accelerator_type, use_gpu, run_async, "
            f"{', '.join(sorted(_SETTINGS))}."
        )


def _one_of(name: str, value: Any, newer: str, newer_value: Any) -> Any:
    if value is not None and newer_value is not None:
        raise TypeError(f"{name} and {newer} are two names of one thing: give one of them.")
    return value if newer_value is None else newer_value


def _split(gpu_type: Any) -> tuple[int | None, Any]:
    """Split "GPU_8xH100" into how many a node has, and what."""
    found = _ACCELERATOR.fullmatch(gpu_type) if isinstance(gpu_type, str) else None
    return (int(found[1]), found[2]) if found else (None, gpu_type)


def _ranks(wanted: int | None, remote: bool, use_gpu: bool) -> Any:
    """Find out how many ranks there are to be.

    Raises
    ------
    ValueError
        Where nobody says, or there are fewer GPUs.
    """
    if wanted is None and (remote or not use_gpu):
        raise ValueError(
            "gpus says how many ranks there are to be: only on this machine's GPUs (remote=False) "
            "is there a default, all of them."
        )
    if remote or not use_gpu:
        return wanted
    there = len(driver_gpus(Session.active()))
    if wanted is not None and isinstance(wanted, int) and wanted > there > 0:
        raise ValueError(
            f"gpus is {wanted}, and this machine has {there}. Ask for fewer, or for those of the "
            "Spark cluster with remote=True."
        )
    return max(there, 1) if wanted is None else wanted


def _pool() -> str | None:
    if name := os.environ.get(POOL_VARIABLE):
        return name
    reserved = os.environ.get(RESERVED_VARIABLE)
    if reserved is None:
        return None
    session = Session.active()
    if session is not None and (why := session.why_no_pools()):
        warn(f"{RESERVED_VARIABLE} is set, but is passed over: {why}.")
        return None
    return POOLS[reserved.strip().lower() not in ("false", "0", "no")]
