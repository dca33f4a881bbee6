"""The private API of Accelerate and Transformers, neither of which is imported here."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any


def mark_as_prepared(loader: object) -> None:
    """Have ``Accelerator.prepare`` return a data loader as it is, without sharding it again."""
    loader._is_accelerate_prepared = True  # type: ignore[attr-defined]


def keep_shares_whole(accelerator: ModuleType, is_share: Callable[[object], bool]) -> None:
    """Have an ``Accelerator`` leave a dataset whole that is one rank's share already."""
    # The Transformers Trainer prepares its data loaders by an Accelerator, too.
    prepare = accelerator.prepare_data_loader
    signature = inspect.signature(prepare)

    @functools.wraps(prepare)
    def prepare_whole(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(dataloader, *args, **kwargs)
        if not is_share(dataloader.dataset):
            return prepare(*call.args, **call.kwargs)
        # Neither divided, nor read by rank 0 and distributed by it.
        call.arguments.update(
            num_processes=1, process_index=0, dispatch_batches=False, torch_device_mesh=None
        )
        prepared = prepare(*call.args, **call.kwargs)
        # Otherwise gather_for_metrics would cut the last batches of all ranks to the rows of one.
        prepared._drop_last = True
        return prepared

    accelerator.prepare_data_loader = prepare_whole  # type: ignore[attr-defined]


def state_arguments(state: Any) -> dict[str, Any]:
    """Return the arguments with which a ``PartialState`` was made."""
    return {"cpu": state._cpu}


def see_all_ranks(state: ModuleType) -> None:
    """Have a ``PartialState`` without a GPU see the other ranks."""
    # Accelerate looks for them on CPUs only if it is asked to: an Accelerator by a variable, a
    # PartialState by an argument. The Transformers TrainingArguments make one, too.
    initialize = state.PartialState.__init__

    @functools.wraps(initialize)
    def initialize_with_all(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        import torch

        is_one_of_many = int(os.environ.get("WORLD_SIZE", "1")) > 1
        default = is_one_of_many and not torch.cuda.is_available()
        use_cpu = state.parse_flag_from_env("ACCELERATE_USE_CPU", default)
        initialize(self, cpu or use_cpu, **kwargs)

    state.PartialState.__init__ = initialize_with_all


# The attributes of ``TrainingArguments`` that say which of how many processes this one is.
_VIEW = {"_setup_devices", "__cached__setup_devices", "_n_gpu", "distributed_state"}


def training_arguments(arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return from what ``TrainingArguments`` can be made anew, but not their view of processes."""
    names = {field.name for field in dataclasses.fields(arguments) if field.init}
    attributes = {name: value for name, value in vars(arguments).items() if name not in _VIEW}
    taken = {name: attributes.pop(name) for name in names & attributes.keys()}
    return taken, attributes
