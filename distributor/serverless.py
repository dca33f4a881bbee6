"""``@distributed``: runs a decorated function on all ranks when ``.distributed()`` is called.

Its parts are also those of ``@ray_launch``: an object that decorators make of a function, and the
launcher that creates the distributor of each of its runs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    NamedTuple,
    NoReturn,
    ParamSpec,
    TypeVar,
    overload,
)

from distributor.control.future import RunFuture
from distributor.core.cell_errors import ends_at_caller
from distributor.core.gpus import AcceleratorType, GPUType, split_accelerator
from distributor.core.spelling import Spelling, check_names
from distributor.programs import check_arguments
from distributor.run_spec import Settings
from distributor.screen.messages import warn
from distributor.serialization.pickle_diagnostics import name_of
from distributor.serverless_errors import (
    IN_PLACE,
    GPUTypeError,
    GPUValidationError,
    RuntimeConfigurationError,
    raised_as,
)
from distributor.settings import (
    check_bool,
    check_gpu_type,
    check_num_processes,
    check_timeout,
    documented,
)
from distributor.spark.plan import driver_gpus
from distributor.spark.session import Session
from distributor.torch_distributor import TorchDistributor

if TYPE_CHECKING:
    from typing_extensions import Self

P = ParamSpec("P")
R = TypeVar("R")
Decorated = TypeVar("Decorated", bound="DecoratedFunction[Any, Any]")

_UNSET: Any = object()  # timeout=None means that there is no limit
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
    return decorated("@distributed", DistributedFunction, ServerlessLauncher, locals())


def decorated(
    api: str,
    kind: type[Decorated],
    launcher_class: type[ServerlessLauncher],
    arguments: dict[str, Any],
) -> Any:
    """Return what a decorator returns, of which these are all arguments, by their names."""
    first = arguments["num_accelerators"]
    is_bare = callable(first)  # it has no parentheses, and decorates this at once
    if is_bare:
        arguments = {**arguments, "num_accelerators": None}
    launcher = launcher_class.of(api, **arguments)

    def decorate(function: Callable[..., Any]) -> Decorated:
        if not callable(function) and not isinstance(function, classmethod):
            raise TypeError(f"{api} must decorate a function, but got {function!r}.")
        return kind(function, launcher, launcher.run_async)

    return decorate(first) if is_bare else decorate


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
    # By which a pickled function finds it again, see `_load`.
    key: str = field(init=False, default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        _launchers[self.key] = self

    @classmethod
    @ends_at_caller
    def of(cls, api: str, *, settings: Mapping[str, Any], **arguments: Any) -> Self:
        """Return the launcher for a decorator's arguments, whose names are checked."""
        own = inspect.signature(distributed).parameters.keys() - {"settings"}
        check_names(api, settings, {*own, *_SETTINGS})
        count, kind = _take_given(arguments)
        if count.value is None and kind.name == "gpu_type":  # the user has the older names
            count = Given("gpus", None)
        return cls(api, count, kind, settings=settings, **arguments)

    @ends_at_caller
    def with_overrides(self, **arguments: Any) -> Self:
        """Return a launcher with these arguments in place of its own, as far as they are given."""
        count, kind = _take_given(arguments)
        return replace(
            self,
            count=self.count if count.value is None else count,
            kind=self.kind if kind.value is None else kind,
            **arguments,
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


def _take_given(arguments: dict[str, Any]) -> list[Given]:
    """Take the number of GPUs and their type, which have two names each, from the arguments."""
    found = []
    for name, older in (("num_accelerators", "gpus"), ("accelerator_type", "gpu_type")):
        value, older_value = arguments.pop(name), arguments.pop(older)
        if value is not None and older_value is not None:
            raise RuntimeConfigurationError(
                f"{older} and {name} are two names of one argument: pass only {name}."
            )
        found.append(Given(name, value) if older_value is None else Given(older, older_value))
    return found


def _ranks(name: str, wanted: int | None, remote: bool, use_gpu: bool) -> Any:
    """Return the number of ranks."""
    if remote or not use_gpu:
        if wanted is None:
            raise ValueError(
                f"{name}, the number of ranks, is missing. It is optional only on this machine's "
                "GPUs (remote=False, use_gpu=True), and then all of them are used."
            )
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


class DecoratedFunction(Generic[P, R]):
    """A function with settings for its runs. A plain call runs it once, in this process.

    In a class it is a method: each access binds it, as it binds a function, so that runs get the
    instance or the class as their first argument.
    """

    def __init__(
        self,
        function: Callable[P, R],
        launcher: ServerlessLauncher | _UnknownLauncher,
        run_async: bool,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._launcher = launcher
        self._run_async = run_async

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def __get__(self: Decorated, instance: object, owner: type | None = None) -> Decorated:
        bind = getattr(type(self._function), "__get__", None)
        bound = bind(self._function, instance, owner) if bind else self._function
        if bound is self._function:
            return self
        return type(self)(bound, self._launcher, self._run_async)

    @property
    def func(self) -> Callable[P, R]:
        """The function that was decorated."""
        return self._function

    @property
    def num_accelerators(self) -> int | None:
        """The number of GPUs, or of ranks on CPUs; None if it is that of this machine's GPUs."""
        return self._launcher.num_accelerators

    @property
    def accelerator_type(self) -> AcceleratorType | str | None:
        """The type of the GPUs, as an `AcceleratorType` if it is one; None if any type will do."""
        return self._launcher.accelerator_type

    def with_overrides(
        self: Decorated,
        num_accelerators: int | None = None,
        accelerator_type: AcceleratorType | GPUType | str | None = None,
        remote: bool | None = None,
        timeout: float | None = _UNSET,
        *,
        gpus: int | None = None,
        gpu_type: GPUType | str | None = None,
    ) -> Decorated:
        """Return the function with other arguments of its decorator.

        Follows ``DistributedFunction.with_overrides`` of ``databricks.air``.

        Parameters
        ----------
        num_accelerators, accelerator_type, remote, gpus, gpu_type
            Arguments of the decorator. Those that are None stay as they are.
        timeout : float or None, optional
            Seconds, or None for no limit; by default it stays as it is.

        Returns
        -------
        DistributedFunction or RayFunction
            The function with these arguments. The original is unchanged.

        Raises
        ------
        TypeError
            If both names of one argument are given.

        Examples
        --------
        >>> train.with_overrides(num_accelerators=8, remote=True).distributed()  # doctest: +SKIP
        """
        others: dict[str, Any] = {} if remote is None else {"remote": remote}
        if timeout is not _UNSET:
            others["timeout"] = timeout
        launcher = self._launcher.with_overrides(
            num_accelerators=num_accelerators,
            accelerator_type=accelerator_type,
            gpus=gpus,
            gpu_type=gpu_type,
            **others,
        )
        return type(self)(self._function, launcher, self._run_async)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle this without its settings, which may hold secrets and what cannot be pickled."""
        state = {name: value for name, value in vars(self).items() if name != "_launcher"}
        return _load, (type(self), self._function, self._launcher.key), state


class DistributedFunction(DecoratedFunction[P, R]):
    """A function that can run on many ranks, as ``@distributed`` returns it.

    A plain call runs the function once, in this process.

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
        """Run the function on every rank, with the same arguments.

        Parameters
        ----------
        *args, **kwargs
            Arguments of the function.

        Returns
        -------
        list or RunFuture
            The values of all ranks, in the order of global ranks; with ``run_async=True`` a future
            of them, as `distributed_async` returns.

        Raises
        ------
        TypeError, ValueError
            If an argument of ``@distributed`` is invalid, or the function does not take these
            arguments.
        Exception
            The failed rank's own exception, or an error of this package, as
            `TorchDistributor.run` raises them.

        Examples
        --------
        >>> train.distributed(num_epochs=3)  # doctest: +SKIP
        """
        if self._run_async:
            return self.distributed_async(*args, **kwargs)
        check_arguments(self._function, args, kwargs)
        return self._launcher().run_all(self._function, *args, **kwargs)

    @ends_at_caller
    def distributed_async(self, *args: P.args, **kwargs: P.kwargs) -> RunFuture[list[R]]:
        """Start a run of the function on every rank. Several runs may be active at once.

        A script that reaches its end waits for its active runs.

        Parameters
        ----------
        *args, **kwargs
            Arguments of the function.

        Returns
        -------
        RunFuture
            A `concurrent.futures.Future` of what `distributed` returns or raises. Its ``cancel()``
            ends the run.

        Raises
        ------
        TypeError, ValueError, OSError, RuntimeError
            If an argument is invalid, as `TorchDistributor.submit` raises it, or the function does
            not take these arguments.

        Examples
        --------
        >>> future = train.distributed_async(num_epochs=3)  # doctest: +SKIP
        >>> future.result()  # doctest: +SKIP
        """
        check_arguments(self._function, args, kwargs)
        return self._launcher().submit_all(self._function, *args, **kwargs)


def distributor_of(function: DecoratedFunction[P, R]) -> TorchDistributor:
    """Return the distributor of a decorated function's runs; check its decorator's arguments."""
    return function._launcher()


class _UnknownLauncher:
    """Takes the place of a launcher in a process to which the function was sent."""

    num_accelerators = accelerator_type = None

    def __init__(self, name: str, key: str) -> None:
        self._name = name
        self.key = key

    def __call__(self, **changed: Any) -> NoReturn:
        raise RuntimeError(
            f"{self._name} was pickled, and the settings of its runs were not: it cannot "
            "start a run in this process. Call it directly, or decorate it again here."
        )

    with_overrides = __call__


_launchers: weakref.WeakValueDictionary[str, ServerlessLauncher | _UnknownLauncher]
_launchers = weakref.WeakValueDictionary()
"""The launchers by their keys, with which functions are pickled. A function that returns to the
process that has its settings, inside the value of a run, has them again."""


def _load(kind: type[Decorated], function: Callable[..., Any], key: str) -> Decorated:
    launcher = _launchers.get(key)
    if launcher is None:
        launcher = _launchers[key] = _UnknownLauncher(name_of(function), key)
    return kind(function, launcher, False)
