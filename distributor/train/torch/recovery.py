"""Models and state of ranks that go on in their processes when others are lost."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from distributor.rank.context import worker_context
from distributor.rank.membership import Membership

_COPIES_BUFFERS = "forward_sync_buffers", "broadcast_buffers"
"""DDP's parameter: its newest name, and that of older versions of torch."""


def replicated(
    module: torch.nn.Module, membership: Membership, options: Mapping[str, Any]
) -> Replica | None:
    """Return a model whose ranks go on without a lost one; None, and why, if it cannot be one."""
    if options.get("find_unused_parameters") or options.get("static_graph"):
        membership.refuse("the model has find_unused_parameters or static_graph")
    elif any(isinstance(each, torch.nn.SyncBatchNorm) for each in module.modules()):
        membership.refuse("the model has SyncBatchNorm")
    elif "process_group" in options or "device_mesh" in options:
        membership.refuse("the model has a process group of its own")
    if membership.refusal is not None:
        return None
    return Replica(module, membership, options)


class Replica(torch.nn.Module):
    """A model in DistributedDataParallel, which is made anew for each group of members.

    It has DDP's attribute `module`, its `no_sync`, and the names of its parameters.
    """

    _ddp: DistributedDataParallel | None

    def __init__(
        self, module: torch.nn.Module, membership: Membership, options: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.module = module
        self._options, self._membership = dict(options), membership
        self._copies_buffers = False not in [options.get(name) for name in _COPIES_BUFFERS]
        self._before: list[torch.Tensor] = []  # its buffers at the begin of a step
        self._syncs = self._has_synced = True  # gradients; buffers are copied after that, as by DDP
        self._set_ddp(None)
        membership.follow_model(self)
        if not membership.joins:
            self._wrap(init_sync=True)

    def enter(self) -> None:
        self._has_synced = True
        self._wrap(init_sync=False)  # the members have copied the state

    def leave(self) -> None:
        self._set_ddp(None)

    def _set_ddp(self, ddp: DistributedDataParallel | None) -> None:
        self.__dict__["_ddp"] = ddp  # as no submodule: state dicts have each parameter once

    def restore_buffers(self) -> None:
        for buffer, before in zip(self.module.buffers(), self._before, strict=False):
            buffer.data.copy_(before)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ddp, membership = self._ddp, self._membership
        if torch.is_grad_enabled():
            self._begin()
        if ddp is not None and not membership.is_broken:
            try:
                return ddp(*args, **kwargs)
            except RuntimeError as error:
                if not membership.note_error(error):
                    raise
        return self.module(*args, **kwargs)  # the next step of the optimizer changes nothing

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self) -> None:
        if self._membership.begin_forward():
            self._before = [each.clone() for each in self.module.buffers()]
        if self._copies_buffers and self._has_synced and not self._membership.joins:
            self._membership.copy_buffers(self.module)
        self._has_synced = self._syncs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication, as DDP's method does."""
        before, self.require_backward_grad_sync = self._syncs, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether ``backward`` averages gradients, as DDP's attribute."""
        return self._syncs

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, syncs: bool) -> None:
        self._syncs = syncs
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = syncs

    def _wrap(self, init_sync: bool) -> None:
        # DDP itself would wait for a rank that is lost.
        known = inspect.signature(DistributedDataParallel).parameters
        copies = {next(name for name in _COPIES_BUFFERS if name in known): False}
        options = {**self._options, "init_sync": init_sync, **copies}
        ddp = DistributedDataParallel(self.module, **options)
        reduce = self._membership.reduce
        group = torch.distributed.group.WORLD  # `dist.all_reduce` takes more time
        # In a function without annotations, as torch checks them.
        ddp.register_comm_hook(group, lambda group, bucket: reduce(group, bucket))
        ddp.require_backward_grad_sync = self._syncs
        self._set_ddp(ddp)


class State:
    """Values of a training loop that a process must know that takes the place of a lost rank.

    With ``recovery="in_place"``, a step that is interrupted by the loss of a rank changes nothing,
    and the loop makes one iteration more. What the interrupted iteration assigns to this object
    after the step has no effect, other changes are undone when the next one calls the model, and a
    replacement gets the values of the others. So write loops with it: ``while state.epoch <
    epochs``, and not ``for epoch in ...``.
    Without ``recovery="in_place"``, and outside a run, it is a plain object. Follows the idea of
    ``TorchState`` of Elastic Horovod:
    https://horovod.readthedocs.io/en/stable/elastic_include.html

    Parameters
    ----------
    **values : object
        The attributes and their first values, which can be pickled.

    Examples
    --------
    >>> state = State(epoch=0, step=0)
    >>> while state.epoch < 2:
    ...     for step in range(3):
    ...         state.step += 1
    ...     state.epoch += 1
    >>> state.step
    6
    """

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)
        membership = worker_context().membership
        if membership is not None:
            membership.follow(self)

    def __setattr__(self, name: str, value: Any) -> None:
        membership = worker_context().membership
        if membership is None or not membership.is_void or name not in vars(self):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"This state has no {name!r}: pass {name}=... to State.")

    def save(self) -> dict[str, Any]:
        """Return a deep copy of the values."""
        return copy.deepcopy(vars(self))

    def load(self, saved: Mapping[str, Any]) -> None:
        """Set the values.

        Parameters
        ----------
        saved : mapping of str to object
            What `save` has returned.
        """
        vars(self).clear()
        vars(self).update(saved)

    def on_members(self, rank: int, size: int) -> None:
        """Called on each rank when the members have changed; does nothing unless overridden.

        Parameters
        ----------
        rank : int
            This rank's new number.
        size : int
            The new number of ranks.
        """
