"""What this package uses of torch that is not documented.

Torch is imported inside the functions: a driver and its cluster's tasks do without it.
"""

from __future__ import annotations

import functools
import json
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import FunctionType, ModuleType
from typing import Any

from distributor._compat import replacing

# Modules that a process's first optimizer imports, which takes about a second.
OPTIMIZER_IMPORTS = ("torch._dynamo",)

# Parts, in lower case, of the messages of gloo, NCCL and stores when another process has gone.
LOST_CONNECTION = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket timeout",
    "failed to recv",
    "remote process exited",
    "nccl communicator was aborted",
)


def recorded_collectives() -> list[dict[str, Any]]:
    """Return the last collectives of this process that torch has recorded, the oldest first."""
    # NCCL has a recorder of its own, and records by default; gloo if TORCH_FR_BUFFER_SIZE is set.
    module = sys.modules.get("torch._C._distributed_c10d")
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    dumps = [dump for name in names if (dump := getattr(module, name, None))]
    entries = [entry for dump in dumps for entry in json.loads(dump()).get("entries", ())]
    return sorted(entries, key=lambda entry: int(entry.get("time_created_ns", 0)))


def is_typed_storage(storage: Any) -> bool:
    """Return whether this is the deprecated storage with a type, of which torch pickles tensors."""
    import torch

    return type(storage) is torch.storage.TypedStorage


def untyped_storage(storage: Any) -> Any:
    """Return the bytes of a typed storage; the documented ``untyped`` warns of its deprecation."""
    return storage._untyped_storage


def typed_storage(storage: Any, dtype: Any) -> Any:
    """Wrap bytes as the storage that torch's pickles of tensors refer to, without its warning."""
    import torch

    make: Any = torch.storage.TypedStorage
    return make(wrap_storage=storage, dtype=dtype, _internal=True)


def is_rebuilder_of_bytes(function: FunctionType) -> bool:
    """Return whether pickles of tensors have this function if their dtype has no typed storage."""
    # Among these dtypes are float8, uint16 and complex32.
    return function.__name__ == "_rebuild_tensor_v3" and function.__module__ == "torch._utils"


def rebuild_tensor_of_bytes(storage: Any, *args: Any) -> Any:
    """Rebuild such a tensor; torch's function expects the bytes as ``torch.load`` wraps them."""
    import torch

    rebuild: Any = torch._utils._rebuild_tensor_v3
    with torch.no_grad():  # otherwise it fails with tensors that require a gradient
        return rebuild(typed_storage(storage, torch.uint8), *args)


def read_log_variables() -> None:
    """Configure torch's logging by ``TORCH_LOGS``, as its import does."""
    import torch

    torch._logging._internal._init_logs()


def read_debug_level() -> None:
    """Set the level of torch's checks by ``TORCH_DISTRIBUTED_DEBUG``, as its import does."""
    import torch.distributed as dist

    dist.set_debug_level_from_env()  # type: ignore[attr-defined]


def serve_store(host: str, port: int, listener: int) -> Any:
    """Serve a `TCPStore` on a listening socket that exists, and return at once."""
    import torch
    import torch.distributed as dist

    # The store that torch 2.4 uses by default takes no socket; its older one does.
    is_old = torch.__version__ < "2.5"  # compared as versions
    options: dict[str, Any] = {"use_libuv": False} if is_old else {}
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=True, master_listen_fd=listener, wait_for_workers=False, **options
    )


def choose_store(rendezvous: ModuleType, choose: Callable[[str, int], str]) -> None:
    """Have torch ask for the host of the store that ``init_process_group`` connects to."""

    @replacing(rendezvous, "_create_c10d_store")
    def create_chosen(
        create: Any, hostname: str, port: int, rank: int, world_size: int, *args: Any, **kwargs: Any
    ) -> Any:
        store = create(choose(hostname, port), port, rank, world_size, *args, **kwargs)
        _kept_stores[:] = [store] if world_size > 1 else []
        return store


# The store that this process has opened last.
#
# A rank that serves it keeps it after ``destroy_process_group``: another rank may have connected to
# it again already, for the next ``init_process_group``.
_kept_stores: list[Any] = []


def has_had_group() -> bool:
    """Return whether this process has a process group, or had one and opened its store."""
    import torch.distributed as dist

    return bool(_kept_stores) or (dist.is_available() and dist.is_initialized())


def separate_initializations(distributed_c10d: ModuleType) -> None:
    """Have each initialization of the default process group use keys of its own in its store."""
    # Torch uses the same keys each time. A rank that initializes its group again at once reads what
    # a slower rank has written for the group that both have just destroyed, and connects to sockets
    # that no longer exist.
    #
    # Each rank counts its initializations in the store, for each number of ranks, because other
    # processes can follow it as the same rank. It counts those that succeed, so that all ranks may
    # try again. The first keeps torch's keys: a process without this function can take part in it.

    @replacing(distributed_c10d, "_new_process_group_helper")
    def create_apart(create: Any, *args: Any, **kwargs: Any) -> Any:
        size, rank, ranks, backend, store, *others = args
        # MPI needs no store, and that of the backend for tests stores nothing.
        if kwargs.get("group_desc") != "default_pg" or backend in ("mpi", "fake"):
            return create(*args, **kwargs)
        count = f"initializations/{size}/{rank}"
        done = store.add(count, 0)
        own = store
        # What the first rank writes decides for all of them.
        if done or store.compare_set("initializations", "", str(size)) != str(size).encode():
            own = distributed_c10d.PrefixStore(f"initializations/{size}/{done}", store)
        created = create(size, rank, ranks, backend, own, *others, **kwargs)
        store.add(count, 1)
        return created


def wrap_spawned(spawn: ModuleType, wrap: Callable[[Any], Any]) -> None:
    """Have ``torch.multiprocessing`` start processes with ``wrap(function)``."""

    @replacing(spawn, "start_processes")
    def start_wrapped(start: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        _kept_stores.clear()  # the processes may use the same port
        return start(wrap(fn), *args, **kwargs)

    multiprocessing: Any = sys.modules["torch.multiprocessing"]
    multiprocessing.start_processes = start_wrapped


def keep_groups_of_models(parallel: ModuleType) -> None:
    """Have each DDP model keep its process group's Python object until the model is freed."""

    @replacing(parallel.DistributedDataParallel, "__init__")
    def keep_group(initialize: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        # The reducer and the logger share the C++ object. A finalizer runs after that is freed,
        # and not before, since neither class is written in Python.
        for owner in (getattr(self, name, None) for name in ("reducer", "logger")):
            if owner is not None:  # neither exists if DDP itself reduces no gradient
                weakref.finalize(owner, _release, self.process_group).atexit = False


def call_after_steps(optimizer: ModuleType, call: Callable[[], object]) -> Any:
    """Call a function after each step of an optimizer, also of one that is compiled.

    Returns torch's handle, which can remove it.
    """

    def call_eagerly(*_: object) -> None:
        call()

    vars(call_eagerly)["_torchdynamo_disable"] = True  # the decorator for it imports for a second
    return optimizer.register_optimizer_step_post_hook(call_eagerly)


def note_models(parallel: ModuleType, note: Callable[..., object], gpu_stride: int) -> None:
    """Pass each DDP model to a function, with what reads its waiting: `ddp_waiting`.

    The function's third argument is whether torch measures each iteration: it does so on CPUs. On
    GPUs, it measures one of `gpu_stride`, because it synchronizes for each.
    """

    @replacing(parallel.DistributedDataParallel, "__init__")
    def note_new(initialize: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if getattr(self, "logger", None) is not None:
            knows_all = self.device_type == "cpu"
            self._set_ddp_runtime_logging_sample_rate(1 if knows_all else gpu_stride)
            note(self, ddp_waiting, knows_all)


def ddp_waiting(model: Any) -> tuple[int, float] | None:
    """Return the last iteration of a DDP model that was measured, and how long it waited.

    These are the seconds from the end of its backward pass to that of its communication. They are
    those of one iteration; torch's averages are since the start. None if there are none yet.
    """
    found = model.logger._get_ddp_logging_data().ints_map
    if "backward_comm_time" not in found:
        return None
    waited = found["backward_comm_time"] - found["backward_compute_comm_overlap_time"]
    return found["iteration"], max(waited, 0) / 1e9


Timing = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a function that does the same, and times each call."""


def time_loaders(dataloader: ModuleType, timed: Timing) -> None:
    """Time what iterators of data loaders do until they return a batch, and their start."""
    time_calls(dataloader._BaseDataLoaderIter, ("__next__",), timed)
    time_calls(dataloader.DataLoader, ("__iter__",), timed)


def time_calls(owner: Any, names: tuple[str, ...], timed: Timing) -> None:
    """Time the calls of functions of a module, which its package may export too, or of a class."""
    for name in names:
        original = getattr(owner, name)
        replacement = functools.wraps(original)(timed(original))
        for each in (owner, sys.modules.get(owner.__name__.rpartition(".")[0])):
            if getattr(each, name, None) is original:
                setattr(each, name, replacement)


def forget_failed_group() -> None:
    """Have the next default process group use the keys that one has used which could not form."""
    import torch.distributed as dist

    dist.distributed_c10d._world.group_count = 0


def limit_group(seconds: float) -> None:
    """Set how long a collective of the default process group may take."""
    import torch.distributed as dist

    limit = timedelta(seconds=seconds)
    dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)


def begin_alone(distributed_c10d: ModuleType) -> None:
    """Have ``init_process_group`` form a group of this process alone, unless it gets a store."""

    @replacing(distributed_c10d, "rendezvous")
    def be_alone(_: Any, *args: Any, **kwargs: Any) -> Any:
        yield sys.modules["torch.distributed"].HashStore(), 0, 1


def follow_schedulers(
    lr_scheduler: ModuleType, follow: Callable[[Any], object], is_void: Callable[[Any], bool]
) -> None:
    """Pass new schedulers to a function; have them not count a step that has changed nothing."""

    def wrap_step(owner: Any) -> None:
        @replacing(owner, "step")
        def step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
            return None if is_void(self) else original(self, *args, **kwargs)

    for owner in vars(lr_scheduler).values():
        if isinstance(owner, type) and issubclass(owner, lr_scheduler.LRScheduler):
            if "__init__" in vars(owner):  # some constructors call no other one, and no step
                note_calls(owner, "__init__", lambda scheduler, *_, **__: follow(scheduler))
            if "step" in vars(owner):
                wrap_step(owner)


def note_calls(owner: Any, name: str, note: Callable[..., object]) -> None:
    """Pass the arguments of each call of a function to another one first."""

    @replacing(owner, name)
    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return original(*args, **kwargs)


def keep_destroyed_groups(distributed_c10d: ModuleType) -> None:
    """Have the process groups that a program destroys exist until its process ends."""
    import torch

    if torch.__version__ >= "2.8":  # compared as versions
        return

    @replacing(distributed_c10d, "destroy_process_group")
    def keep_and_destroy(destroy: Any, *args: Any, **kwargs: Any) -> None:
        _kept_groups.update(process_groups(distributed_c10d))
        destroy(*args, **kwargs)

    distributed: Any = sys.modules["torch.distributed"]  # torch may not have the attribute yet
    if hasattr(distributed, "destroy_process_group"):  # not while it is being imported
        distributed.destroy_process_group = keep_and_destroy


def process_groups(distributed_c10d: ModuleType) -> list[Any]:
    """Return the process groups of this process."""
    return list(distributed_c10d._world.pg_map)


# The groups that `keep_destroyed_groups` keeps; those that are not destroyed yet, too.
_kept_groups: set[Any] = set()


def keep_shares_whole(distributed: ModuleType, is_share: Callable[[object], bool]) -> None:
    """Have ``DistributedSampler`` sample all of a dataset that is one rank's share already."""

    @replacing(distributed.DistributedSampler, "__init__")
    def initialize_whole(
        initialize: Any,
        self: Any,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # Lightning's wrapper of a sampler passes the sampler as the dataset's `_sampler`.
        sampler = getattr(dataset, "_sampler", None)
        if is_share(getattr(sampler, "data_source", dataset)):
            num_replicas, rank = 1, 0
        initialize(self, dataset, num_replicas, rank, *args, **kwargs)


def _release(group: object) -> None:
    """Release a group: `weakref.finalize` has referred to it until now."""
