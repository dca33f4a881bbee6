"""What the trials of a study run: a function, a ``@distributed`` function, or a `TorchTrainer`."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

from distributor.control.run import Run
from distributor.data.dataframes import DatasetFinder
from distributor.programs import SharedFunction
from distributor.serverless import DecoratedFunction, DistributedFunction, distributor_of
from distributor.torch_distributor import TorchDistributor, prepare_run

Arguments = dict[str, Any] | tuple[Any, ...]
Ranks = int | tuple[int, int]
Tracked = Callable[..., Any]


class Job(Protocol):
    """What the trials of a study run, and how."""

    distributor: TorchDistributor
    """That of all trials, but for the name and the number of ranks."""

    def prepare(self, arguments: Arguments, name: str, ranks: Ranks, tracked: Tracked) -> Run:
        """Prepare the run of a trial.

        Parameters
        ----------
        arguments : dict or tuple
            What the user's ``space`` has returned.
        name : str
            The run's name, if it has storage.
        ranks : int or (int, int)
            The number of its ranks.
        tracked : callable
            Returns its MLflow run; see `prepare_run`.
        """


def job_of(train: Any, distributor: TorchDistributor | None) -> Job:
    """Return what the trials run, for the arguments of ``optimize``, which are checked."""
    module = sys.modules.get("distributor.train.trainer")  # importing it takes a while
    is_trainer = module is not None and isinstance(train, module.TorchTrainer)
    if is_trainer or isinstance(train, DistributedFunction):
        if distributor is not None:
            raise TypeError(
                f"train is a {type(train).__name__}, which knows how it runs: leave out "
                "distributor."
            )
        return _TrainerJob(train) if is_trainer else _FunctionJob(distributor_of(train), train.func)
    if isinstance(train, DecoratedFunction) or not callable(train):
        raise TypeError(
            "train must be a function, a TorchTrainer or a @distributed function, but is "
            f"{train!r} of type {type(train).__name__}."
        )
    if not isinstance(distributor, TorchDistributor):
        raise TypeError(
            "train is a function, so distributor must be a TorchDistributor, which runs it, such "
            f"as TorchDistributor(2); but it is {distributor!r}."
        )
    return _FunctionJob(distributor, train)


class _FunctionJob:
    def __init__(self, distributor: TorchDistributor, function: Any) -> None:
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        while isinstance(function, functools.partial):
            args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
            function = function.func
        self.distributor = distributor
        self._bound = args, kwargs, function
        bound = DatasetFinder().replace_in(*self._bound)
        self._function = SharedFunction(function, *bound)

    def prepare(self, arguments: Arguments, name: str, ranks: Ranks, tracked: Tracked) -> Run:
        stored = name if self.distributor.storage_path is not None else None
        distributor = replace(self.distributor, num_processes=ranks, name=stored)
        finder = DatasetFinder()
        finder.replace_in(*self._bound)  # which have the first numbers
        bound, named, function = self._bound
        partly = functools.partial(function, *bound, **named)
        given = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
        args, kwargs = finder.replace_in(*given, partly)
        return prepare_run(distributor, False, self._function, args, kwargs, finder, tracked)


class _TrainerJob:
    def __init__(self, trainer: Any) -> None:
        from distributor.train.trainer import prepare_fit

        self._config = trainer.train_loop_config or {}
        if not isinstance(self._config, Mapping):
            raise TypeError(
                "train_loop_config must be a dict, into which those of space are merged, but is a "
                f"{type(self._config).__name__}."
            )
        if trainer.running_in_local_mode:
            raise ValueError(
                "ScalingConfig(num_workers=0) trains in this process, and a trial needs a run of "
                "its own: pass 1 or more."
            )
        self._prepare = functools.partial(prepare_fit, trainer)
        loop, _, self.distributor, _ = self._prepare({}, "study")
        self._loop = SharedFunction(loop, (), {})

    def prepare(self, arguments: Arguments, name: str, ranks: Ranks, tracked: Tracked) -> Run:
        from distributor.train.worker_loop import loop_arguments

        if not isinstance(arguments, dict):
            raise TypeError(
                "space must return a dict, which is merged into train_loop_config, but has "
                f"returned {arguments!r}."
            )
        config = {**self._config, **arguments}
        loop, datasets, distributor, validations = self._prepare(config, name)
        if config and not loop_arguments(loop.func, config):
            raise TypeError(
                f"{loop.__name__} has no parameter without a default, so it does not get what "
                "space returns: write config as its first parameter."
            )
        distributor = replace(distributor, num_processes=ranks)
        args, kwargs = (datasets,), {"config": config}
        run = prepare_run(distributor, False, self._loop, args, kwargs, None, tracked)
        run.folder = _both(run.folder, validations)
        return run


@contextlib.contextmanager
def _both(
    outer: AbstractContextManager[object], inner: AbstractContextManager[object]
) -> Iterator[None]:
    with outer, inner:
        yield
