"""``@ray_launch``: runs a function as the driver of a Ray cluster that lasts as long as the run.

This is the driver's part. A rank's part is in `program`, which starts a Ray node (`node`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar, overload

from distributor.control.future import RunFuture
from distributor.core.cell_errors import ends_at_caller
from distributor.core.gpus import AcceleratorType, GPUType
from distributor.core.versions import install_command
from distributor.data.dataframes import DatasetFinder
from distributor.decorated_function import DecoratedFunction, decorator_of
from distributor.programs import check_arguments, check_runs
from distributor.ray.program import TEMP_DIR_VARIABLE, RayProgram, why_no_ray
from distributor.run_spec import Settings
from distributor.screen.messages import warn_once
from distributor.serverless import Given, ServerlessLauncher
from distributor.settings.fields import documented
from distributor.settings.types import check_num_processes
from distributor.spark.session import Session
from distributor.torch_distributor import TorchDistributor

__all__ = ["RayFunction", "ray_launch", "require_ray"]

P = ParamSpec("P")
R = TypeVar("R")


def require_ray() -> None:
    """Check that Ray is installed.

    Raises
    ------
    ImportError
        If it is not, or is too old.
    """
    if why := why_no_ray():
        raise ImportError(
            f"{why} in this Python. Install the same version here and on all nodes: "
            f"{install_command('ray')}.",
            name="ray",
        )


class RayFunction(DecoratedFunction[P, R]):
    """A function that can run on a Ray cluster of its own, as ``@ray_launch`` returns it.

    A plain call runs the function once, in this process, and starts no Ray cluster.

    Parameters
    ----------
    function : callable
        The decorated function, or a ``classmethod`` or ``staticmethod`` of one.
    launcher : callable
        Returns the `TorchDistributor` for a run.
    run_async : bool
        Whether `distributed` returns a future.
    """

    @ends_at_caller
    def distributed(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Start a Ray cluster, run the function once on its head node, and end the cluster.

        Parameters
        ----------
        *args, **kwargs
            Arguments of the function.

        Returns
        -------
        object or RunFuture
            The function's value; with ``run_async=True`` a future of it, as `distributed_async`
            returns.

        Raises
        ------
        ImportError
            If Ray is not installed, or is too old.
        TypeError, ValueError
            If an argument of ``@ray_launch`` is invalid, or the function does not take these
            arguments.
        StartTimeout
            If not all Ray nodes have started within ``start_timeout``.
        Exception
            The function's own exception, or an error of this package, as `TorchDistributor.run`
            raises them.

        Examples
        --------
        >>> count_gpus.distributed()  # doctest: +SKIP
        """
        if self._run_async:
            return self.distributed_async(*args, **kwargs)
        distributor, program = self._prepare(args, kwargs)
        return distributor.run(program, *args, **kwargs)

    @ends_at_caller
    def distributed_async(self, *args: P.args, **kwargs: P.kwargs) -> RunFuture[R]:
        """Start what `distributed` does in the background. Several runs may be active at once.

        Each run has a Ray cluster of its own. A script that reaches its end waits for its active
        runs.

        Parameters
        ----------
        *args, **kwargs
            Arguments of the function.

        Returns
        -------
        RunFuture
            A `concurrent.futures.Future` of what `distributed` returns or raises. Its ``cancel()``
            ends the run and its cluster.

        Raises
        ------
        ImportError
            If Ray is not installed, or is too old.
        TypeError, ValueError, OSError, RuntimeError
            If an argument is invalid, as `TorchDistributor.submit` raises it, or the function does
            not take these arguments.

        Examples
        --------
        >>> future = count_gpus.distributed_async()  # doctest: +SKIP
        >>> future.result()  # doctest: +SKIP
        """
        distributor, program = self._prepare(args, kwargs)
        return distributor.submit(program, *args, **kwargs)

    def _prepare(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[TorchDistributor, RayProgram]:
        require_ray()
        check_runs(self._function)
        check_arguments(self._function, args, kwargs)
        _check_no_datasets(self._function, args, kwargs)
        distributor = self._launcher()
        cores = None if distributor.local_mode else _executor_cores(Session.active())
        return distributor, RayProgram(self._function, distributor.start_timeout, cores)


@overload
def ray_launch(num_accelerators: Callable[P, R]) -> RayFunction[P, R]: ...


@overload
def ray_launch(
    num_accelerators: int | None = None,
    accelerator_type: AcceleratorType | GPUType | str | None = None,
    remote: bool = False,
    timeout: float | None = None,
    *,
    gpus: int | None = None,
    gpu_type: GPUType | str | None = None,
    use_gpu: bool = True,
    run_async: bool = False,
    **settings: Any,
) -> Callable[[Callable[P, R]], RayFunction[P, R]]: ...


@documented(Settings, skip=["gpu_type", "timeout"])
def ray_launch(
    num_accelerators: Any = None,
    accelerator_type: AcceleratorType | GPUType | str | None = None,
    remote: bool = False,
    timeout: float | None = None,
    *,
    gpus: int | None = None,
    gpu_type: GPUType | str | None = None,
    use_gpu: bool = True,
    run_async: bool = False,
    **settings: Any,
) -> Any:
    """Decorate a function so that it can run on a Ray cluster of its own.

    ``.distributed()`` starts a Ray node in each Spark task (or one on this machine), with the CPUs
    and GPUs of that node, and waits until all of them have joined. The function then runs once, on
    the head node, with Ray initialized. All processes and files of the cluster are gone when the
    run has ended, however it ends. The cluster accepts only clients with the token of its run.

    The decorator follows ``databricks.air.ray_launch`` and ``serverless_gpu.ray.ray_launch``:
    https://docs.databricks.com/aws/en/machine-learning/ai-runtime/connecting/distributed-training.

    Parameters
    ----------
    num_accelerators : int, optional
        Number of GPUs of the cluster; with ``use_gpu=False`` and ``remote=True`` the number of Ray
        nodes. By default it is the number of GPUs of a node of `accelerator_type` or, if that does
        not say it, of this machine.
    accelerator_type : AcceleratorType, GPUType or str, optional
        Required type of the GPUs, such as "GPU_8xH100" or "A10", in upper or lower case.
    remote : bool, default False
        Whether Ray nodes run on the executors of the active Spark session instead of this machine.
    timeout : float, optional
        Seconds after which the run is ended; by default there is no limit.
    gpus : int, optional
        The older name of `num_accelerators`.
    gpu_type : GPUType or str, optional
        The older name of `accelerator_type`.
    use_gpu : bool, default True
        Whether Ray nodes have GPUs.
    run_async : bool, default False
        Whether ``.distributed()`` returns a future at once, as ``.distributed_async()`` does.
    **settings
        Settings of `TorchDistributor`, listed below, as for ``@distributed``. ``start_timeout``
        also bounds the start of the Ray cluster. The cluster's files are in the folder that the
        variable RAY_TEMP_DIR names, if it is set here or in ``env``.

    Other Parameters
    ----------------
    {settings}

    Returns
    -------
    callable
        The decorator, which returns a `RayFunction`. Values are checked at each run.

    Raises
    ------
    TypeError
        If an argument is unknown, or both names of one argument are given.

    Examples
    --------
    >>> @ray_launch(use_gpu=False)  # doctest: +SKIP
    ... def sum_of_squares(count):
    ...     import ray
    ...     square = ray.remote(lambda x: x**2)
    ...     return sum(ray.get([square.remote(x) for x in range(count)]))
    >>> sum_of_squares.distributed(10)  # doctest: +SKIP
    285
    """
    if callable(num_accelerators):  # @ray_launch, without parentheses
        return ray_launch()(num_accelerators)
    launcher = RayLauncher.of(
        "@ray_launch",
        num_accelerators=num_accelerators,
        accelerator_type=accelerator_type,
        remote=remote,
        timeout=timeout,
        gpus=gpus,
        gpu_type=gpu_type,
        use_gpu=use_gpu,
        run_async=run_async,
        settings=settings,
    )
    return decorator_of(RayFunction, "@ray_launch", launcher, run_async)


class RayLauncher(ServerlessLauncher):
    """Creates the distributor of each run of ``@ray_launch``."""

    def __call__(self) -> TorchDistributor:
        count, settings = self.count, _with_variables(self.settings)
        if not self.remote and not self.use_gpu:  # this machine is one Ray node
            _check_unused(*count)
            count = Given(count.name, 1)
        return ServerlessLauncher.__call__(replace(self, count=count, settings=settings))


def _check_no_datasets(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check that there is no Spark DataFrame among the arguments, of which a node has a share."""
    finder = DatasetFinder()
    finder.replace_in(args, kwargs, function)
    if finder.datasets:
        raise TypeError(
            f"{finder.datasets[0].name} is a Spark DataFrame, but the function of @ray_launch runs "
            "once, on the head node. Write the rows with df.write.parquet(path), and read them in "
            "the function with ray.data.read_parquet(path)."
        )


def _check_unused(name: str, count: Any) -> None:
    """Check a number of GPUs that a cluster of this machine without GPUs has no use for."""
    if count is not None and check_num_processes(name, count) != (1, 1):
        warn_once(f"{name} has no effect: without GPUs, this machine is one Ray node.")


def _with_variables(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add the environment variables of a new Ray cluster to a run's settings."""
    env = settings.get("env", {})
    if not isinstance(env, Mapping):
        return dict(settings)  # the distributor raises the error
    temp_dir = os.environ.get(TEMP_DIR_VARIABLE)
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        **({TEMP_DIR_VARIABLE: temp_dir} if temp_dir else {}),
    }
    return {**settings, "env": {**variables, **env}}


def _executor_cores(session: Session | None) -> int | None:
    """Return how many cores each executor has; None if Spark's configuration does not say so."""
    cores = session.conf("spark.executor.cores") if session else None
    return int(cores) if cores else None
