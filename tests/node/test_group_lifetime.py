"""Freeing a DDP model after its process group was destroyed does not block the rank."""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle
import pytest
import torch

from distributor import TorchDistributor
from distributor.core.versions import release

cloudpickle.register_pickle_by_value(sys.modules[__name__])
DEADLINE = 60.0


def free_too_early(folder: str) -> list[bool]:
    """Free a DDP model while an operation of its destroyed group cannot have completed."""
    import gc
    import os
    import time
    import weakref
    from pathlib import Path

    import torch
    import torch._dynamo  # otherwise a module imported later would own the group for good
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    freed = Path(folder, "freed")
    dist.init_process_group("gloo")
    for parameters in ("reduced by DDP", "ignored by DDP"):
        model = torch.nn.Linear(4, 1)
        if parameters == "ignored by DDP":
            names = [name for name, _ in model.named_parameters()]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names[:1])
        replica = DistributedDataParallel(model)
    # A backward pass adds a Python object to the state of each operation that follows.
    replica(torch.ones(2, 4)).sum().backward()
    if dist.get_rank() == 1:
        while not freed.exists():  # rank 0's operation waits for this rank's
            time.sleep(0.01)
        time.sleep(0.5)  # nothing shows that the other rank's main thread is in the destructor
        dist.all_reduce(torch.ones(1))
        return []
    group = weakref.ref(dist.group.WORLD)
    dist.all_reduce(torch.ones(1), async_op=True)
    dist.destroy_process_group()
    threads = len(os.listdir("/proc/self/task"))
    freed.touch()
    del replica
    gc.collect()
    return [group() is None, len(os.listdir("/proc/self/task")) < threads]


@pytest.mark.skipif(
    release(torch.__version__) < (2, 8),
    reason=f"torch {torch.__version__} holds the interpreter's lock while it frees a group",
)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_model_is_freed_after_its_group_was_destroyed(tmp_path: Path) -> None:
    """The group is freed with it, and its threads end."""
    distributor = TorchDistributor(2, local_mode=True, use_gpu=False, timeout=DEADLINE)
    assert distributor.run(free_too_early, str(tmp_path)) == [True, True]
