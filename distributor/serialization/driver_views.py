"""Objects of training frameworks that know which of how many processes their process is.

Those that were made on the driver know of one. A rank that used them would train alone, without a
word. Arguments are made anew in each rank; for other objects, which do not keep what they were made
from, the program of several ranks is refused.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from distributor._compat import accelerate, transformers
from distributor.serialization import oob_pickle


class Pickler(oob_pickle.Pickler):
    """Pickles a call for ranks, without the driver's view of the processes."""

    def reducer_override(self, obj: Any) -> Any:
        if reduce := _reducer_of(type(obj)):  # type: ignore[arg-type]  # it is hashable
            return reduce(obj)
        return super().reducer_override(obj)


@functools.lru_cache(maxsize=1024)
def _reducer_of(kind: type) -> Callable[[Any], tuple[Any, ...]] | None:
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next((_REDUCERS[name] for name in names if name in _REDUCERS), None)


def _reduce_arguments(arguments: Any) -> tuple[Any, ...]:
    return _made_at_first_use, (type(arguments), *transformers.init_arguments(arguments))


def _reduce_state(state: Any) -> tuple[Any, ...]:
    return _made_at_first_use, (type(state), accelerate.init_arguments(state), {})


def _reduce_data_module(module: Any) -> tuple[Any, ...]:
    """Reduce a data module of Lightning without its trainer, as Lightning reduces its modules."""
    make, arguments, state, *rest = module.__reduce_ex__(oob_pickle.PROTOCOL)
    if isinstance(state, dict):  # unless the class has its own
        state = {**state, "trainer": None}
    return make, arguments, state, *rest


def _reduce_lone(obj: Any) -> tuple[Any, ...]:
    make, arguments, *rest = obj.__reduce_ex__(oob_pickle.PROTOCOL)
    return _made_for_one_process, (type(obj).__name__, make, arguments), *rest


def _made_at_first_use(kind: type, arguments: dict[str, Any], attributes: dict[str, Any]) -> Any:
    """Return an object that is initialized when it is first used, by the program.

    By then the program may have set variables, or started the process group by itself.
    """

    def initialize_and_get(self: Any, name: str) -> Any:
        object.__setattr__(self, "__class__", kind)
        kind.__init__(self, **arguments)  # type: ignore[misc]
        for key, value in attributes.items():
            vars(self).setdefault(key, value)
        return getattr(self, name)

    namespace = {"__slots__": (), "__getattribute__": initialize_and_get}
    return object.__new__(type(kind)(kind.__name__, (kind,), namespace))


def _made_for_one_process(name: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        raise TypeError(
            f"The driver's {name}, which the function uses or has among its arguments, was made "
            f"for one process: each of the {ranks} ranks would train alone. Make the {name} inside "
            "the function. What it is made from can be an argument."
        )
    return make(*arguments)


_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
_REDUCERS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "transformers.training_args.TrainingArguments": _reduce_arguments,
    "accelerate.state.PartialState": _reduce_state,
    **{f"{name}.core.datamodule.LightningDataModule": _reduce_data_module for name in _LIGHTNING},
    **dict.fromkeys(
        (
            "accelerate.accelerator.Accelerator",
            "accelerate.data_loader.DataLoaderDispatcher",
            "accelerate.data_loader.DataLoaderShard",
            "accelerate.optimizer.AcceleratedOptimizer",
            "accelerate.scheduler.AcceleratedScheduler",
            "accelerate.state.AcceleratorState",
            "lightning.fabric.fabric.Fabric",
            "lightning_fabric.fabric.Fabric",
            *(f"{name}.trainer.trainer.Trainer" for name in _LIGHTNING),
            "transformers.trainer.Trainer",
        ),
        _reduce_lone,
    ),
}
"""What to do with a class and its subclasses, by its full name."""
