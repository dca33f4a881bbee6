"""What decorators make of a function: an object that starts runs of it."""

from __future__ import annotations

import functools
import uuid
import weakref
from collections.abc import Callable
from typing import Any, Generic, NoReturn, ParamSpec, Protocol, TypeVar

from distributor.control.future import RunFuture
from distributor.core.cell_errors import ends_at_caller
from distributor.core.gpus import AcceleratorType, GPUType
from distributor.programs import check_arguments
from distributor.serialization.pickle_diagnostics import name_of
from distributor.torch_distributor import TorchDistributor

P = ParamSpec("P")
R = TypeVar("R")
_UNSET: Any = object()  # timeout=None means that there is no limit
Decorated = TypeVar("Decorated", bound="DecoratedFunction[Any, Any]")


class Launcher(Protocol):
    """Creates the distributor of each run of a decorated function, whose arguments it has."""

    @property
    def num_accelerators(self) -> int | None: ...
    @property
    def accelerator_type(self) -> AcceleratorType | str | None: ...
    def __call__(self) -> TorchDistributor: ...
    def with_overrides(
        self,
        *,
        num_accelerators: int | None = None,
        accelerator_type: Any = None,
        gpus: int | None = None,
        gpu_type: Any = None,
        **others: Any,
    ) -> Launcher: ...


class DecoratedFunction(Generic[P, R]):
    """A function with settings for its runs. A plain call runs it once, in this process.

    In a class it is a method: each access binds it, as it binds a function, so that runs get the
    instance or the class as their first argument.
    """

    def __init__(self, function: Callable[P, R], launcher: Launcher, run_async: bool) -> None:
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
        others = {"remote": (remote, None), "timeout": (timeout, _UNSET)}
        launcher = self._launcher.with_overrides(
            num_accelerators=num_accelerators,
            accelerator_type=accelerator_type,
            gpus=gpus,
            gpu_type=gpu_type,
            **{name: value for name, (value, unset) in others.items() if value is not unset},
        )
        return type(self)(self._function, launcher, self._run_async)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle this without its settings, which may hold secrets and what cannot be pickled."""
        state = {name: value for name, value in vars(self).items() if name != "_launcher"}
        return _load, (type(self), self._function, _key_of(self._launcher)), state


def decorator_of(
    kind: type[Decorated], api: str, launcher: Launcher, run_async: bool
) -> Callable[[Callable[..., Any]], Decorated]:
    """Return a decorator, which returns an object of this kind."""

    def decorate(function: Callable[..., Any]) -> Decorated:
        if not callable(function) and not isinstance(function, classmethod):
            raise TypeError(f"{api} must decorate a function, but got {function!r}.")
        return kind(function, launcher, run_async)

    return decorate


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


_keys: weakref.WeakKeyDictionary[Launcher, str] = weakref.WeakKeyDictionary()
_launchers: weakref.WeakValueDictionary[str, Launcher] = weakref.WeakValueDictionary()
"""The launchers of pickled functions and their keys. A function that returns to the process that
has its settings, inside the value of a run, has them again."""


def _key_of(launcher: Launcher) -> str:
    key = _keys.setdefault(launcher, uuid.uuid4().hex)
    _launchers[key] = launcher
    return key


class _Unknown:
    """Takes the place of a launcher in a process to which the function was sent."""

    num_accelerators = accelerator_type = None

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, **changed: Any) -> NoReturn:
        raise RuntimeError(
            f"{self._name} was pickled, and the settings of its runs were not: it cannot "
            "start a run in this process. Call it directly, or decorate it again here."
        )

    with_overrides = __call__


def _load(kind: type[Decorated], function: Callable[..., Any], key: str) -> Decorated:
    launcher = _launchers.get(key)
    if launcher is None:
        launcher = _Unknown(name_of(function))
        _keys[launcher], _launchers[key] = key, launcher
    return kind(function, launcher, False)
