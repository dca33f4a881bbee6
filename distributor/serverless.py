"""``@distributed``: runs a decorated function on all ranks when ``.distributed()`` is called."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, overload

from distributor.core.cell_errors import ends_at_caller
from distributor.core.gpus import AcceleratorType, GPUType, split_accelerator
from distributor.core.spelling import Spelling, check_names
from distributor.decorated_function import DistributedFunction, decorator_of
from distributor.run_spec import Settings
from distributor.screen.messages import warn
from distributor.serverless_errors import (
    IN_PLACE,
    GPUTypeError,
    GPUValidationError,
    RuntimeConfigurationError,
    raised_as,
)
from distributor.settings.fields import documented
from distributor.settings.types import (
    check_bool,
    check_gpu_type,
    check_num_processes,
    check_timeout,
)
from distributor.spark.plan import driver_gpus
from distributor.spark.session import Session
from distributor.torch_distributor import TorchDistributor

if TYPE_CHECKING:
    from typing_extensions import Self

P = ParamSpec("P")
R = TypeVar("R")

POOL_VARIABLE = "DISTRIBUTOR_POOL"
POOL_ID_VARIABLE = "DATABRICKS_REMOTE_GPU_POOL_ID"
RESERVED_VARIABLE = "DATABRICKS_USE_RESERVED_GPU_POOL"
POOLS = {True: "reserved", False: "on-demand"}
"""The pool for each value of the last variable, as defined in conf/fairscheduler.xml."""
_SWITCHES = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@overload
def distributed(num_accelerators: Callable[P, R]) -> DistributedFunction[P, R]: ...


@overload
def distributed(
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
) -> Callable[[Callable[P, R]], DistributedFunction[P, R]]: ...


@documented(Settings, skip=["gpu_type", "timeout"])
def distributed(
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
    """Decorate a function so that it can run on many ranks.

    The decorator follows ``databricks.air.distributed`` and ``serverless_gpu.distributed``:
    https://docs.databricks.com/aws/en/machine-learning/ai-runtime/connecting/distributed-training.

    Parameters
    ----------
    num_accelerators : int, optional
        Number of ranks, each with a GPU; with ``use_gpu=False`` the number of ranks. By default
        it is the number of GPUs of a node of `accelerator_type` or, if that does not say it, of
        this machine.
    accelerator_type : AcceleratorType, GPUType or str, optional
        Required type of the GPUs, such as "GPU_8xH100" or "A10", in upper or lower case.
    remote : bool, default False
        Whether ranks run on the executors of the active Spark session instead of this machine.
    timeout : float, optional
        Seconds after which the run is ended; by default there is no limit.
    gpus : int, optional
        The older name of `num_accelerators`.
    gpu_type : GPUType or str, optional
        The older name of `accelerator_type`.
    use_gpu : bool, default True
        Whether each rank has a GPU. If False, GPUs are hidden from ranks and `accelerator_type` is
        not compared with them.
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
        If an argument is unknown. If both names of one argument are given, it is a
        `RuntimeConfigurationError` of `distributor.serverless_errors`.

    Examples
    --------
    >>> @distributed(num_accelerators=2, use_gpu=False)
    ... def square_of_rank():
    ...     from distributor import runtime
    ...     return runtime.get_global_rank() ** 2
    >>> square_of_rank.distributed()
    [0, 1]
    """
    if callable(num_accelerators):  # @distributed, without parentheses
        return distributed()(num_accelerators)
    launcher = ServerlessLauncher.of(
        "@distributed",
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
    return decorator_of(DistributedFunction, "@distributed", launcher, run_async)


class Given(NamedTuple):
    """An argument that has two names, and the one that the user has passed."""

    name: str
    value: Any


@dataclass(frozen=True, eq=False)
class ServerlessLauncher:
    """Creates the distributor of each run, from a decorator's arguments.

    Parameters
    ----------
    api : str
        The decorator, such as "@distributed".
    count : tuple of str and int or None
        The number of GPUs, and the name that the user has for it.
    kind : tuple of str and AcceleratorType, GPUType, str or None
        Their type, and its name.
    remote, timeout, use_gpu, run_async, settings
        The decorator's arguments.
    """

    api: str
    count: Given
    kind: Given
    remote: bool
    timeout: float | None
    use_gpu: bool
    run_async: bool
    settings: Mapping[str, Any]

    @classmethod
    @ends_at_caller
    def of(
        cls,
        api: str,
        *,
        num_accelerators: int | None,
        accelerator_type: Any,
        gpus: int | None,
        gpu_type: Any,
        settings: Mapping[str, Any],
        **others: Any,
    ) -> Self:
        """Return the launcher for a decorator's arguments, whose names are checked."""
        own = inspect.signature(distributed).parameters.keys() - {"settings"}
        check_names(api, settings, {*own, *_SETTINGS})
        count = _one_of("num_accelerators", num_accelerators, "gpus", gpus)
        kind = _one_of("accelerator_type", accelerator_type, "gpu_type", gpu_type)
        if count.value is None and kind.name == "gpu_type":  # the user has the older names
            count = Given("gpus", None)
        return cls(api, count, kind, settings=settings, **others)

    @ends_at_caller
    def with_overrides(
        self,
        *,
        num_accelerators: int | None = None,
        accelerator_type: Any = None,
        gpus: int | None = None,
        gpu_type: Any = None,
        **others: Any,
    ) -> Self:
        """Return a launcher with these arguments in place of its own, as far as they are given."""
        count = _one_of("num_accelerators", num_accelerators, "gpus", gpus)
        kind = _one_of("accelerator_type", accelerator_type, "gpu_type", gpu_type)
        return replace(
            self,
            count=self.count if count.value is None else count,
            kind=self.kind if kind.value is None else kind,
            **others,
        )

    @property
    def num_accelerators(self) -> Any:
        """The number of GPUs, or of ranks; None if it is that of the GPUs of this machine."""
        of_node, _ = split_accelerator(self.kind.value)
        return of_node if self.count.value is None else self.count.value

    @property
    def accelerator_type(self) -> Any:
        """The type: an AcceleratorType if there is one of such nodes, otherwise as it was given."""
        value = self.kind.value
        with contextlib.suppress(GPUTypeError):
            return AcceleratorType(value)
        with contextlib.suppress(GPUTypeError):
            return AcceleratorType.from_gpu_type(GPUType(value), self.num_accelerators)
        return value

    def __call__(self) -> TorchDistributor:
        """Check the arguments, and return a distributor."""
        of_node, kind = split_accelerator(self.kind.value)
        name = self.count.name
        if self.count.value is None and of_node is not None:
            name = f"the number of GPUs in {self.kind.name}={str(self.kind.value)!r}"

        class Distributor(TorchDistributor):
            spelling = Spelling(
                self.api,
                name,
                "pass remote=False",
                gpu_type=self.kind.name,
                errors=IN_PLACE,
            )

        with raised_as(RuntimeConfigurationError):
            for switch in ("remote", "use_gpu", "run_async"):
                check_bool(switch, getattr(self, switch))
            check_timeout("timeout", self.timeout)
        with raised_as(GPUTypeError):
            check_gpu_type(self.kind.name, kind)
        with raised_as(GPUValidationError):
            ranks = _ranks(name, self.num_accelerators, self.remote, self.use_gpu)
            check_num_processes(name, ranks)
        on_gpus = not self.remote and self.use_gpu
        missing: Any = GPUTypeError if kind else GPUValidationError
        with raised_as(missing) if on_gpus else contextlib.nullcontext():
            return Distributor(
                ranks,
                local_mode=not self.remote,
                use_gpu=self.use_gpu,
                gpu_type=kind,
                timeout=self.timeout,
                **{"pool": _pool() if self.remote else None, **self.settings},
            )


_SETTINGS = {field.name for field in fields(Settings)} - {"gpu_type", "timeout"}


def _one_of(name: str, value: Any, older: str, older_value: Any) -> Given:
    if value is not None and older_value is not None:
        raise RuntimeConfigurationError(
            f"{older} and {name} are two names of one argument: pass only {name}."
        )
    return Given(name, value) if older_value is None else Given(older, older_value)


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
