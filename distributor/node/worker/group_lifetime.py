"""Keeps a process group alive as long as freeing it could block.

The destructor of a gloo process group waits for the group's threads, and such a thread needs the
interpreter's lock to free its last operation: since torch 2.13 every backward pass leaves a Python
object in the state that an operation carries. Torch releases the lock when it frees the Python
object of a group, but not when it frees a DDP model's reducer. So if ``destroy_process_group()`` is
called first and the model is freed afterwards, the reducer is the last owner of the group, and the
process can deadlock. Whether it does under torchrun depends on the order of imports: the default
arguments in ``torch.distributed.nn.functional`` own the default group if that module (which
``torch._dynamo`` imports) is first imported after ``init_process_group``.

Before version 2.8 (https://github.com/pytorch/pytorch/pull/154976), torch does not release the lock
in ``destroy_process_group()`` either. With torch 2.4, three of four runs of torchrun in which three
ranks destroy their group right after ``all_gather_object`` did not end.
"""

from __future__ import annotations

from distributor._compat import torch as private
from distributor.rank.import_hooks import after_import


def keep_groups() -> None:
    """Have every DDP model of this process keep its group's Python object until it is freed.

    Destroyed groups exist until this process ends, if its torch cannot free them safely.
    """
    after_import("torch.nn.parallel.distributed", private.keep_groups_of_models)
    after_import("torch.distributed.distributed_c10d", private.keep_destroyed_groups)
