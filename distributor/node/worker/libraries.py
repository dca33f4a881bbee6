"""What a rank changes in torch, PySpark and frameworks once its program imports them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from distributor._compat import huggingface, lightning, pyspark, torch
from distributor.core.gpus import cpus_near
from distributor.node.process.fork_reset import set_thread_counts
from distributor.rank.context import WorkerContext
from distributor.rank.import_hooks import adapt, at_next_import
from distributor.rank.messages import Progress, Trained

SPARK_FILES = "DISTRIBUTOR_SPARK_FILES"
"""The variable of a rank on an executor that has the folder of ``SparkContext.addFile``'s files."""
LOGS = ("TORCH_LOGS", "TORCH_LOGS_FORMAT", "TORCH_LOGS_OUT")
DEBUG_LEVEL = "TORCH_DISTRIBUTED_DEBUG"


def adapt_libraries(uses_gpus: bool, context: WorkerContext) -> None:
    # Accelerate, Transformers and Lightning train one model on all ranks by default, even on CPUs,
    # of which they would use one.
    adapt("accelerate.state", huggingface.see_all_ranks)
    adapt("accelerate.state", huggingface.note_ignored_fsdp)
    adapt("accelerate.utils.fsdp_utils", huggingface.refuse_lost_adapters)
    for name in lightning.CONNECTORS:
        adapt(name, partial(lightning.see_all_ranks, uses_gpus=uses_gpus))
    _keep_groups()
    _report_training(context)
    _report_steps(context)
    # `SparkFiles` finds files as in Spark's own functions.
    if folder := os.environ.get(SPARK_FILES):
        for name in pyspark.MODULES_OF_SPARK_FILES:
            adapt(name, partial(pyspark.find_spark_files, folder=folder))


def _report_training(context: WorkerContext) -> None:
    """Have this rank report at its end whether an optimizer has made steps in it."""
    had_group: list[bool] = []

    def note_step(*_: object) -> None:
        if not had_group:
            had_group.append(torch.has_had_group())

    def report() -> None:
        if had_group:
            context.send(Trained(had_group[0] or torch.has_had_group()))

    adapt("torch.optim.optimizer", lambda each: each.register_optimizer_step_post_hook(note_step))
    context.add_final_step(report)


def _report_steps(context: WorkerContext) -> None:
    """Have the steps of a Transformers ``Trainer`` be the progress of the run."""

    def report(done: int, total: int) -> None:
        context.send(Progress(done=done, total=total, metrics={}))

    adapt("transformers.trainer", partial(huggingface.report_progress, report=report))


def _keep_groups() -> None:
    """Keep a process group alive as long as freeing it could block."""
    # The destructor of a gloo process group waits for the group's threads, and such a thread needs
    # the interpreter's lock to free its last operation: since torch 2.13 every backward pass leaves
    # a Python object in the state that an operation carries. Torch releases the lock when it frees
    # the Python object of a group, but not when it frees a DDP model's reducer. So if
    # `destroy_process_group()` is called first and the model is freed afterwards, the reducer is
    # the last owner of the group, and the process can deadlock. Whether it does under torchrun
    # depends on the order of imports: the default arguments in `torch.distributed.nn.functional`
    # own the default group if that module (which `torch._dynamo` imports) is first imported after
    # `init_process_group`. So every DDP model keeps its group's Python object until it is freed.
    adapt("torch.nn.parallel.distributed", torch.keep_groups_of_models)
    # Before version 2.8 (https://github.com/pytorch/pytorch/pull/154976), torch does not release
    # the lock in `destroy_process_group()` either. With torch 2.4, three of four runs of torchrun
    # in which three ranks destroy their group right after `all_gather_object` did not end. There,
    # destroyed groups exist until this process ends.
    adapt("torch.distributed.distributed_c10d", torch.keep_destroyed_groups)


def read_variables_at_import() -> None:
    """Apply the variables that the program changes from now on when it imports torch.

    In a warm rank torch has been imported before the program starts. This is what torch can still
    apply.
    """
    before = dict(os.environ)
    at_next_import("torch", lambda: _apply_changes(before))


def _apply_changes(before: dict[str, str]) -> None:
    changed = {name for name, _ in before.items() ^ os.environ.items()}
    if any(name.endswith("_NUM_THREADS") for name in changed):
        set_thread_counts()
    if not changed.isdisjoint(LOGS):
        torch.read_log_variables()
    if DEBUG_LEVEL in changed:
        torch.read_debug_level()


_NODES = Path("/sys/devices/system/node")


def bind_to_numa_node(uses_gpus: bool) -> None:
    """Restrict this process to the CPUs near its GPU, or to its share of the NUMA nodes.

    It stays as it is if that would change nothing, or if the nodes are not known.
    """
    allowed = os.sched_getaffinity(0)
    local_rank, ranks = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if uses_gpus:
        gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        near = cpus_near(gpus[local_rank % len(gpus)])
    else:
        near = share_of_nodes(_cpus_of_nodes(allowed), local_rank, ranks)
    if (cpus := near & allowed) and cpus != allowed:
        os.sched_setaffinity(0, cpus)
        if "torch" in sys.modules:  # in a forked rank, which may have more threads than CPUs now
            set_thread_counts()


def share_of_nodes(nodes: Sequence[set[int]], local_rank: int, ranks: int) -> set[int]:
    """Return the CPUs of a rank's share of the nodes: some of them, or one for several ranks."""
    first, end = (rank * len(nodes) // ranks for rank in (local_rank, local_rank + 1))
    return set().union(*nodes[first : max(end, first + 1)])


def _cpus_of_nodes(allowed: set[int]) -> list[set[int]]:
    """Return the CPUs of each NUMA node that has any of those allowed."""
    lists = sorted(_NODES.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    found = (_parse_cpus(path.read_text()) & allowed for path in lists)
    return [cpus for cpus in found if cpus]


def _parse_cpus(text: str) -> set[int]:
    """Parse a list such as "0-3,8-11"."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {cpu for low, _, high in ranges for cpu in range(int(low), int(high or low) + 1)}
