"""Keeps a process group alive as long as a DDP model can use it.

The destructor of a gloo process group waits for the group's threads, and such a thread needs the
interpreter's lock to free its last operation: since torch 2.13 every backward pass leaves a Python
object in the state that an operation carries. Torch releases the lock when it frees the Python
object of a group, but not when it frees a DDP model's reducer. So if ``destroy_process_group()`` is
called first and the model is freed afterwards, the reducer is the last owner of the group, and the
process can deadlock. Whether it does under torchrun depends on the order of imports: the default
arguments in ``torch.distributed.nn.functional`` own the default group if that module (which
``torch._dynamo`` imports) is first imported after ``init_process_group``.
"""

from __future__ import annotations

import functools
import weakref
from types import ModuleType
from typing import Any

from distributor.node.worker.import_hooks import after_import


def keep_groups_of_models() -> None:
    """Have every DDP model of this process keep its group's Python object until it is freed."""
    after_import("torch.nn.parallel.distributed", _change)


def _change(module: ModuleType) -> None:
    initialize = module.DistributedDataParallel.__init__

    @functools.wraps(initialize)
    def keep_group(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        # Logger and reducer share the ownership of what is freed. A finalizer runs after that, and
        # not before, since neither class is written in Python.
        for owner in (getattr(self, name, None) for name in ("reducer", "logger")):
            if owner is not None:  # neither exists if no gradient is reduced by DDP itself
                weakref.finalize(owner, _release, self.process_group).atexit = False

    module.DistributedDataParallel.__init__ = keep_group


def _release(group: object) -> None:
    """Let go of a group: `weakref.finalize` has referred to it until now."""
