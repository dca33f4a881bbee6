"""What a rank changes in torch, PySpark and frameworks once its program imports them."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distributor._compat import huggingface, lightning, pyspark, torch
from distributor.core.addresses import is_loopback, joined, resolve
from distributor.core.gpus import cpus_near
from distributor.node.process.fork_reset import set_thread_counts
from distributor.rank.context import WorkerContext
from distributor.rank.import_hooks import adapt, at_next_import
from distributor.rank.membership import Membership
from distributor.rank.messages import Progress, Trained
from distributor.rank.step_clock import CHECKPOINT, DATA, GPU_STRIDE, WAITED, StepClock
from distributor.serialization import code_pickle

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
    _report_training(context)
    _report_steps(context)
    if context.clock.counts:
        _count_steps(context.clock)
    # `SparkFiles` finds files as in Spark's own functions.
    if folder := os.environ.get(SPARK_FILES):
        for name in pyspark.MODULES_OF_SPARK_FILES:
            adapt(name, partial(pyspark.find_spark_files, folder=folder))


def follow_members(membership: Membership, context: WorkerContext) -> None:
    """Have this rank go on in its process if others are lost, as far as its program allows it."""
    if context.uses_gpus:  # or torch ends a communicator, or this process, by itself
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    if context.data is not None:
        membership.refuse("a DataFrame is among the arguments")

    def note_group(*_: object, **__: object) -> None:
        membership.refuse("the program makes process groups (new_group)")

    def note_scaler(_: object, *args: object, **options: object) -> None:
        if options.get("enabled", True):
            membership.refuse("the program has a GradScaler")

    def follow_steps(optimizer: Any) -> None:
        optimizer.register_optimizer_step_pre_hook(membership.before_step)
        optimizer.register_optimizer_step_post_hook(membership.after_step)

    groups = "torch.distributed.distributed_c10d"
    if membership.joins:
        adapt(groups, torch.begin_alone)
    adapt(groups, partial(torch.note_calls, name="new_group", note=note_group))
    note_scalers = partial(torch.note_calls, name="__init__", note=note_scaler)
    adapt("torch.amp.grad_scaler", lambda module: note_scalers(module.GradScaler))
    adapt("torch.optim.optimizer", follow_steps)
    follow, is_void = membership.follow_scheduler, membership.is_void_for
    follow_schedulers = partial(torch.follow_schedulers, follow=follow, is_void=is_void)
    adapt("torch.optim.lr_scheduler", follow_schedulers)
    context.add_final_step(membership.finish)


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


def _count_steps(clock: StepClock) -> None:
    """Have the rank's clock count what it does from now on."""
    adapt("torch.utils.data.dataloader", partial(torch.time_loaders, timed=clock.timing(DATA)))
    barriers = partial(torch.time_calls, names=("barrier", "monitored_barrier"))
    adapt("torch.distributed.distributed_c10d", partial(barriers, timed=clock.timing(WAITED)))
    timed = clock.timing(CHECKPOINT)
    # Transformers and Accelerate save by it.
    adapt("safetensors.torch", partial(torch.time_calls, names=("save_file",), timed=timed))
    adapt("torch.serialization", partial(torch.time_calls, names=("save",), timed=timed))
    time_savers = partial(torch.time_calls, names=("save", "async_save"), timed=timed)
    adapt("torch.distributed.checkpoint.state_dict_saver", time_savers)
    note_models = partial(torch.note_models, note=clock.add_model, gpu_stride=GPU_STRIDE)
    adapt("torch.nn.parallel.distributed", note_models)
    adapt("torch.optim.optimizer", partial(torch.call_after_steps, call=clock.end_step))


def _report_steps(context: WorkerContext) -> None:
    """Have the steps of a Transformers ``Trainer`` be the progress of the run."""

    def report(done: int, total: int) -> None:
        context.send(Progress(done, total))

    adapt("transformers.trainer", partial(huggingface.report_progress, report=report))


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


# Programs that open a rendezvous of their own, as most PyTorch tutorials do.
#
# A rank's environment names the store that rank 0 serves, and TORCHELASTIC_USE_AGENT_STORE makes
# every rank a client of it. A program that sets MASTER_ADDR and MASTER_PORT itself would therefore
# wait for a store that nobody serves. So would the processes of `torch.multiprocessing.spawn`, if a
# rank's program starts them.

USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
RUN_ID = "TORCHELASTIC_RUN_ID"


def allow_own_rendezvous(host: str, port: int, run_id: str) -> None:
    """Have this process serve a store itself if its program chooses another port."""
    choose = partial(_choose_store, host, port, run_id)
    adapt("torch.distributed.rendezvous", partial(torch.choose_store, choose=choose))
    adapt("torch.distributed.distributed_c10d", torch.separate_initializations)
    wrap = partial(_SpawnedFunction, host, port, run_id)
    adapt("torch.multiprocessing.spawn", partial(torch.wrap_spawned, wrap=wrap))


def _choose_store(host: str, port: int, run_id: str, wanted_host: str, wanted_port: int) -> str:
    """Decide who serves the store that the program wants; return the host to connect to."""
    if os.environ.get(RUN_ID, run_id) != run_id:
        # A rank has started another agent, which serves the store of its own ranks.
        return wanted_host
    is_ours = wanted_port == port
    os.environ[USE_AGENT_STORE] = str(is_ours)
    if wanted_host == host or not _resolves_to_loopback(wanted_host):
        return wanted_host
    if not _is_of_this_machine(host):
        raise ValueError(
            f"The program's rendezvous address is {joined(wanted_host, wanted_port)}, but rank 0 "
            f"is on another machine ({host}). Do not set MASTER_ADDR, MASTER_PORT or init_method "
            "in the program: each rank's environment already has the right values."
        )
    return host if is_ours else wanted_host


def _resolves_to_loopback(host: str) -> bool:
    try:
        return is_loopback(resolve(host)[1])
    except OSError:
        return False  # torch's own error names it


def _is_of_this_machine(host: str) -> bool:
    try:
        family, address = resolve(host)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


class _SpawnedFunction:
    """A function that ``torch.multiprocessing`` calls in processes that it starts.

    It is pickled by value if it cannot be pickled by name, as a nested function.
    """

    def __init__(self, host: str, port: int, run_id: str, function: Callable[..., object]) -> None:
        self.run, self.function = (host, port, run_id), function

    def __call__(self, *args: Any) -> None:
        allow_own_rendezvous(*self.run)
        self.function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            pickle.dumps(self.function)
        except Exception:
            return _load_spawned, (*self.run, code_pickle.dumps(self.function))
        return _SpawnedFunction, (*self.run, self.function)


def _load_spawned(host: str, port: int, run_id: str, pickled: bytes) -> _SpawnedFunction:
    return _SpawnedFunction(host, port, run_id, pickle.loads(pickled))
