"""The private API of Accelerate and Transformers, neither of which is imported here."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from distributor._compat import replacing


def mark_as_prepared(loader: object) -> None:
    """Have ``Accelerator.prepare`` return a data loader as it is, without sharding it again."""
    loader._is_accelerate_prepared = True  # type: ignore[attr-defined]


def keep_shares_whole(
    accelerator: ModuleType,
    is_share: Callable[[object], bool],
    evened: Callable[[Any], Any],
    question: Callable[[object, int | None], None],
) -> None:
    """Have an ``Accelerator`` leave a dataset whole that is one rank's share already.

    `evened` returns a loader that has as many batches as those of the other ranks; `question` is
    asked of what is divided.
    """
    # The Transformers Trainer prepares its data loaders by an Accelerator, too.
    signature = inspect.signature(accelerator.prepare_data_loader)

    @replacing(accelerator, "prepare_data_loader")
    def prepare_whole(prepare: Any, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(dataloader, *args, **kwargs)
        if not is_share(dataloader.dataset):
            question(dataloader.dataset, call.arguments.get("num_processes"))
            return prepare(*call.args, **call.kwargs)
        # Neither divided, nor read by rank 0 and distributed by it.
        call.arguments.update(
            dataloader=evened(dataloader),
            num_processes=1,
            process_index=0,
            dispatch_batches=False,
            torch_device_mesh=None,
        )
        prepared = prepare(*call.args, **call.kwargs)
        # Otherwise gather_for_metrics would cut the last batches of all ranks to the rows of one.
        prepared._drop_last = True
        return prepared


def state_arguments(state: Any) -> dict[str, Any]:
    """Return the arguments with which a ``PartialState`` was made."""
    return {"cpu": state._cpu}


def see_all_ranks(state: ModuleType) -> None:
    """Have a ``PartialState`` without a GPU see the other ranks."""

    # Accelerate looks for them on CPUs only if it is asked to: an Accelerator by a variable, a
    # PartialState by an argument. The Transformers TrainingArguments make one, too.
    @replacing(state.PartialState, "__init__")
    def initialize_with_all(initialize: Any, self: Any, cpu: bool = False, **kwargs: Any) -> None:
        import torch

        is_one_of_many = int(os.environ.get("WORLD_SIZE", "1")) > 1
        default = is_one_of_many and not torch.cuda.is_available()
        use_cpu = state.parse_flag_from_env("ACCELERATE_USE_CPU", default)
        initialize(self, cpu or use_cpu, **kwargs)


def refuse_lost_adapters(fsdp_utils: ModuleType) -> None:
    """Have FSDP2 refuse a PEFT model of which Accelerate saves one rank's adapters only."""
    version = importlib.metadata.version("accelerate")
    if [int(part) for part in version.split(".")[:2]] >= [1, 15]:
        return

    @replacing(fsdp_utils, "fsdp2_prepare_model")
    def prepare_checked(prepare: Any, accelerator: Any, model: Any) -> Any:
        kind = str(accelerator.state.fsdp_plugin.state_dict_type)
        if hasattr(model, "peft_config") and kind.endswith("FULL_STATE_DICT"):
            raise RuntimeError(
                f"Accelerate {version} saves rank 0's part of the adapters of a PEFT model that "
                "FSDP2 shards, and a resumed run loses the others "
                "(https://github.com/huggingface/accelerate/pull/4206). Install accelerate 1.15 or "
                "later in the environment of the ranks."
            )
        return prepare(accelerator, model)


def note_ignored_fsdp(state: ModuleType) -> None:
    """Say that Accelerate trains with DDP on CPUs where a program asks for FSDP."""

    @replacing(state.AcceleratorState, "__init__")
    def initialize_noting(initialize: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        is_first = not state.AcceleratorState._shared_state
        initialize(self, *args, **kwargs)
        wanted = state.parse_flag_from_env("ACCELERATE_USE_FSDP")
        if is_first and wanted and "CPU" in str(self.distributed_type) and self.is_main_process:
            print("distributor: on CPUs Accelerate ignores FSDP: it uses DDP.", flush=True)


def report_progress(trainer: ModuleType, report: Callable[[int, int], object]) -> None:
    """Have each ``Trainer`` report its steps: how many are done, and of how many."""

    class ReportSteps(trainer.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                report(state.global_step, state.max_steps)

    trainer.DEFAULT_CALLBACKS.append(ReportSteps)


# The attributes of ``TrainingArguments`` that say which of how many processes this one is.
_VIEW = {"_setup_devices", "__cached__setup_devices", "_n_gpu", "distributed_state"}


def training_arguments(arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return from what ``TrainingArguments`` can be made anew, but not their view of processes."""
    names = {field.name for field in dataclasses.fields(arguments) if field.init}
    attributes = {name: value for name, value in vars(arguments).items() if name not in _VIEW}
    taken = {name: attributes.pop(name) for name in names & attributes.keys()}
    return taken, attributes
