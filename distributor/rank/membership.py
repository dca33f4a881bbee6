"""A rank's place among the members of a run whose survivors go on when others are lost.

The driver decides who is a member (`distributor.control.membership`); each decision has a number,
its generation. A rank reads it on the thread of its control channel, and acts on it in its next
optimizer step: it leaves the old process group, forms that of the new members, copies what it
lacks, and drops its gradients, so that this step changes nothing. Nothing is agreed in each step:
a rank is at most one step behind the others, and then copies their state.

A rank that waits inside ``backward`` for one that is lost is woken by completing the future of its
communication hook, which is its own: neither closing the group nor ``abort`` does that.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any, Literal, NamedTuple, Protocol

import cloudpickle

from distributor._compat.torch import (
    LOST_CONNECTION,
    forget_failed_group,
    limit_group,
    process_groups,
)
from distributor.rank.messages import MemberState

FORMING_SECONDS, FORMING_SECONDS_PER_RANK = 0.05, 0.015
"""Seconds for a group to form; a member that is lost meanwhile costs that, or, while gloo connects
to it, five times that. Four times as many each time."""
NCCL_FORMING_SECONDS = 10.0
"""The same with NCCL, which needs seconds to begin."""
WAITING_SECONDS = 15.0
"""Seconds until a rank asks for other members, because it has waited in vain."""
LIMIT_SECONDS, NCCL_LIMIT_SECONDS = 1800.0, 600.0
"""Seconds that a collective of a group that has formed may take, as in torch."""
REACH_SECONDS = 1.0
"""Seconds for a connection to a store, whose host may be lost too."""
POLL_SECONDS = 0.001
STEPS_AHEAD = 0, 1, 10, 100, 1_000, 10_000, 100_000
"""Steps in which the functions of two schedulers are compared."""
NEWCOMER = -1
"""The steps of a rank that has not joined yet."""


Change = Literal["loss", "growth", "end"]
"""What has led to a generation: a group that has to be left at once, ranks that join one that has
formed, or the end of all members, so that none can join them."""


class Members(NamedTuple):
    """The members of a generation, by their numbers; their ranks are the positions here.

    `store` is the address of the store through which they find each other. `since` has the
    generation in which each of them has joined, and each rank that has finished: a number may be
    that of several processes, one after the other.
    """

    generation: int
    numbers: tuple[int, ...]
    change: Change = "loss"
    store: tuple[str, int] = ("", 0)
    since: tuple[tuple[int, int], ...] = ()

    def to_line(self) -> bytes:
        return json.dumps(self).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Members:
        generation, numbers, change, store, since = json.loads(line)
        return cls(generation, tuple(numbers), change, tuple(store), tuple(map(tuple, since)))


Party = tuple[tuple[int, int], ...]
"""Members that exchange values between their steps, each with the generation of its joining."""


class Model(Protocol):
    """The model of a rank, whose replica is wrapped anew for each group."""

    module: Any

    def enter(self) -> None:
        """Wrap it for the group that has formed."""

    def leave(self) -> None:
        """Drop the wrapper, and with it all that it keeps of the old group."""

    def restore_buffers(self) -> None:
        """Undo what forward passes have changed since the last step that was completed."""


class Follower(Protocol):
    """What a replacement must know beside model and optimizer, as the user's state object."""

    def save(self) -> Any:
        """Return what it is now."""

    def load(self, saved: Any) -> None:
        """Set it to what was saved."""

    def on_members(self, rank: int, size: int) -> None:
        """Called with the new rank and number of ranks once a group has formed."""


class Membership:
    """Forms the groups of a rank; its methods are called on the program's thread.

    Parameters
    ----------
    number : int
        The rank's number when the run began. A replacement has that of the lost rank.
    size : int
        The number of ranks when the run began.
    send : callable
        Sends a record to the driver.
    store : tuple of str and int
        The address of the run's store when the run began, or this rank joins.
    connect : callable
        Returns a new client of a store, for keys with a prefix, within a timeout.
    joins : bool, default False
        Whether this rank replaces a lost one.
    num_reports : callable
        Returns how many reports this rank has made.

    Attributes
    ----------
    steps : int
        Steps of the optimizer that the members have completed.
    generation : int
        The number of the group that has formed last.
    is_void : bool
        Whether the latest step has changed nothing, and is done again. What the program changes in
        its state meanwhile has no effect.
    num_passes : int
        Passes over data in progress that give out the batch of a step again that has changed
        nothing.
    has_batch : bool
        Whether such a pass has given out a batch since the latest step.
    num_collectives : int
        Collectives of ``distributor.train`` that this rank has completed.
    """

    def __init__(
        self,
        number: int,
        size: int,
        send: Callable[[Any], object],
        store: tuple[str, int],
        connect: Callable[..., Any],
        joins: bool = False,
        num_reports: Callable[[], int] = lambda: 0,
    ) -> None:
        self.rank, self.size = number, size
        self.steps = NEWCOMER if joins else 0
        self.generation = 0
        self.is_void = False
        self._is_ahead = False  # of another member, in this step
        self.joins = joins
        self.refusal: str | None = None
        self._number = number
        self._send = send
        self._connect = connect
        self._num_reports = num_reports
        self._news = threading.Condition()
        since = ((number, NEWCOMER),) if joins else tuple((each, 0) for each in range(size))
        self._members = self._notice = Members(0, tuple(range(size)), store=store, since=since)
        self._has_failed = False
        self._waiting: dict[Any, Any] = {}  # futures, and what they are completed with
        self._uses_nccl = False
        self._works: list[Any] = []  # collectives of this step on a GPU
        self._begun = 0  # steps in this group
        self._growth_at: int | None = None
        self._published = 0  # the generation for which others know when this rank grows
        self._stores: dict[int, Any] = {}  # the latest, by the generation
        self._model: Model | None = None
        self._optimizer: Any = None
        self._has_formed = False  # in this step
        self._is_ready = False
        # The steps at which they have counted last.
        self._schedulers: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
        self._followers: list[tuple[weakref.ref[Follower], bool]] = []
        self._undo: list[tuple[Follower, Any]] = []
        self._is_fresh = True  # no forward pass has followed the latest step
        self._thread: int | None = None  # of the program, which makes its steps
        self.num_passes = self.num_collectives = 0
        self.has_batch = False

    # What the driver decides, on the thread of the control channel

    def notify(self, members: Members) -> None:
        """Note the newest members; wake the program if it waits for one that is lost."""
        with self._news:
            if members.generation <= self._notice.generation:
                return
            self._notice, self._growth_at = members, None
            if members.change == "growth" and not self.joins:
                self._publish(members)
            self._news.notify_all()
        if self.is_broken:
            for result in list(self._waiting):
                self._complete(result)

    @property
    def is_broken(self) -> bool:
        """Whether the group has to be left, or a collective of it has failed."""
        return self._has_failed or self._is_left

    @property
    def _is_left(self) -> bool:
        newest = self._notice
        return newest.generation > self.generation and newest.change == "loss"

    # What the program has

    def refuse(self, reason: str) -> None:
        """Report that this rank cannot go on without a restart, and why.

        A rank that has not joined the others waits to be ended: it would train alone.
        """
        if self.refusal is None:
            self.refusal = reason
            self._send(MemberState("unable", reason))
        while self.joins:
            time.sleep(WAITING_SECONDS)

    def finish(self) -> None:
        """Report that this rank's program has returned: it leaves, and is not lost."""
        rank = self.rank  # as which the program has returned
        if self._is_fresh:
            self.attend()  # others may be in the last step
        self._thread = None
        self._send(MemberState("finished", rank=rank))

    def follow_model(self, model: Model) -> None:
        """Form groups for this model."""
        if self._model is not None:
            self.refuse("prepare_model was called for two models")
        self._model = model

    def follow(self, follower: Follower, undo: bool = True) -> None:
        """Have a replacement get what this object saves; it is referred to weakly.

        With `undo`, what an iteration that changed nothing has changed in it is undone.
        """
        self._followers.append((weakref.ref(follower), undo))

    def follow_scheduler(self, scheduler: Any) -> None:
        """Have a replacement get the state of a scheduler; called when it is created."""
        self._schedulers.setdefault(scheduler, None)

    def begin_forward(self) -> bool:
        """Begin an iteration; return whether a step begins."""
        self.end_iteration()
        begins, self._is_fresh = self._is_fresh, False
        return begins

    def end_iteration(self) -> None:
        """End an iteration, also one whose step has changed nothing."""
        for follower, saved in self._undo:
            follower.load(saved)
        self._undo = []
        self.is_void = self._is_ahead = self._has_formed = False

    # The communication hook of DDP

    def reduce(self, group: Any, bucket: Any) -> Any:
        """Average a bucket of gradients; never fails, but notes a failure."""
        # Before they are added, as in DDP: a sum of half-precision numbers could overflow.
        buffer = bucket.buffer().mul_(1 / self.size)
        return self._start(buffer, lambda: group.allreduce([buffer]))

    def copy_buffers(self, module: Any) -> None:
        """Copy the buffers of rank 0, as DDP does; never fails, but notes a failure."""
        import torch
        import torch.distributed as dist

        by_type: dict[Any, list[Any]] = {}
        for buffer in module.buffers():
            by_type.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_type.values():
            whole = torch.cat([buffer.reshape(-1) for buffer in buffers])
            copied = whole.view(torch.uint8)  # gloo does not know all types
            self._start(copied, partial(dist.broadcast, copied, 0, async_op=True)).wait()
            if self.is_broken:
                return
            parts: Any = torch.split(whole, [buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view_as(buffer))

    def _start(self, tensor: Any, begin: Callable[[], Any]) -> Any:
        """Begin a collective; return a future that is also completed if a member is lost."""
        devices = [tensor.device] if tensor.is_cuda else []
        result = _future_type()(devices=devices)
        self._waiting[result] = tensor
        try:
            if not self.is_broken:
                work = begin()
                if devices:  # its future is complete at once: the GPU waits
                    self._works.append(work)
                work.get_future().add_done_callback(partial(self._end, result, self.generation))
                if not self.is_broken:
                    return result
        except RuntimeError:
            self._has_failed = True
        self._complete(result)
        return result

    def _end(self, result: Any, generation: int, done: Any) -> None:
        """Note how a collective has ended, on a thread of its group."""
        try:
            done.wait()
        except RuntimeError:
            if generation == self.generation:  # else, it is the end of a group that was left
                self._has_failed = True
        self._complete(result)

    def _complete(self, result: Any) -> None:
        tensor = self._waiting.pop(result, None)  # by one thread only
        if tensor is not None:
            result.set_result(tensor)

    def note_error(self, error: Exception) -> bool:
        """Return whether an error of a collective in ``forward`` is that of a lost member."""
        text = str(error).lower()
        if self.is_broken or any(each in text for each in LOST_CONNECTION):
            self._has_failed = True
        return self._has_failed

    # Reports and collectives of ``distributor.train``, which wait for all members between steps

    @property
    def party(self) -> Party:
        """The members of this rank's group, and those that may still finish their reports."""
        return self._members.since

    @property
    def store(self) -> tuple[str, int]:
        """The address of the newest members' store."""
        return self._notice.store

    def stand_apart(self) -> None:
        """Make no collective before the next iteration: this rank has joined at another place."""
        self._is_ahead = True

    def is_apart(self, reports: bool = False) -> bool:
        """Return whether this rank makes no collective now, because others do not.

        It has not joined them, or does a step again, which another one has not begun yet. A rank
        that `reports` makes no report either if it has made that of an iteration done again.
        """
        if self._thread not in (None, threading.get_ident()):  # ranks join between any two of them
            self.refuse("a thread that makes no steps reports, or calls a collective")
        is_ahead = self._is_ahead and self.refusal is None
        return self.joins or (self.is_void and (is_ahead or (reports and self.num_passes > 0)))

    def left_of(self, party: Party) -> Party:
        """Return those of a party that are not lost."""
        return tuple(sorted({*party} & {*self._notice.since}))

    def place_in(self, party: Party) -> int:
        """Return this rank's place among them."""
        return [number for number, _ in party].index(self._number)

    def attend(self) -> None:
        """Form a group while this rank waits for all members, if a member is lost.

        Another one may be in a step, in which it waits for that group.
        """
        if self._thread != threading.get_ident() or not self._is_left or self.refusal is not None:
            return
        if not self._is_fresh:
            self.refuse("a rank was lost during a report or a collective in the midst of a step")
        else:
            self._form(self._optimizer)

    # Before and after each step of the optimizer

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._thread = threading.get_ident()
        if self._works and self.refusal is None:
            try:  # nothing but this process ends those of NCCL that wait for a lost member
                self._await(self._works, NCCL_LIMIT_SECONDS)
            except RuntimeError:
                self._has_failed = True
        self._works.clear()  # they keep the group alive
        if self.refusal is not None or not self._accepts(optimizer, args, kwargs):
            return
        with self._news:
            self._begun += 1
            is_new = self._notice.generation > self.generation and self._notice.change == "growth"
        if self.is_broken or self.joins or (is_new and self._is_growth_due()):
            before, has_joined = self.steps, self._form(optimizer)
            self._has_formed, self.is_void = True, has_joined or self.steps == before
            if self.is_void:
                undone = self._living_followers(undone=True)
                self._undo = [(follower, follower.save()) for follower in undone]
            optimizer.zero_grad(set_to_none=True)

    def after_step(self, *_: object) -> None:
        if self.refusal is None and not self._has_formed:
            self.steps += 1
            if not self._is_ready:
                self._is_ready = True
                self._send(MemberState("able"))
        self._is_fresh, self.has_batch = True, False

    def is_void_for(self, scheduler: Any) -> bool:
        """Return whether a scheduler is not to count: no step was completed since it did."""
        if self.is_void and self._schedulers.get(scheduler) == self.steps:
            return True
        self._schedulers[scheduler] = self.steps
        return False

    def _accepts(self, optimizer: Any, args: Any, kwargs: Any) -> bool:
        if self._model is None:
            self.refuse("no model was given to prepare_model")
        elif len(args) > 1 or kwargs.get("closure") is not None:  # the first is the optimizer
            self.refuse("the optimizer's step has a closure")
        elif self.num_passes and not self.has_batch:
            self.refuse("a batch of prepare_data_loader has several steps of the optimizer")
        elif self._optimizer is None:
            self._optimizer = optimizer
        elif self._optimizer is not optimizer:
            self.refuse("there are two optimizers")
        return self.refusal is None

    # Members that join

    def _publish(self, members: Members) -> None:
        """Let the members know how many steps this one has begun: they grow at the next one."""
        with contextlib.suppress(RuntimeError):  # later, unless newer members follow
            self._store_for(members, waits=False).set(f"begun/{self._number}", str(self._begun))
            self._published = members.generation

    def _is_growth_due(self) -> bool:
        if self._growth_at is None:
            newest = self._notice
            names = [f"begun/{number}" for number in self._members.numbers]
            with contextlib.suppress(RuntimeError):
                store = self._store_for(newest)
                with self._news:
                    if self._published < newest.generation:  # the notice came while it formed
                        self._publish(newest)
                while not store.check(names):
                    if self.is_broken:
                        return True
                    time.sleep(POLL_SECONDS)
                self._growth_at = 1 + max(int(store.get(name)) for name in names)
        return self._growth_at is not None and self._begun >= self._growth_at

    def _store_for(self, members: Members, waits: bool = True) -> Any:
        """Return a store for short operations, by both threads: one of them must not wait for it.

        Torch alone would wait for minutes for one that is lost, or is just being lost.
        """
        store, seconds = self._stores.get(members.generation), REACH_SECONDS
        while store is None:
            try:
                socket.create_connection(members.store, REACH_SECONDS).close()
                prefix = f"distributor/members/{members.generation}"
                limit = timedelta(seconds=seconds)
                store = self._connect(prefix, members.store, timeout=limit)
            except (OSError, RuntimeError) as error:
                if not waits or self._notice.generation > members.generation:
                    raise RuntimeError("the store is lost") from error
                seconds *= 2
                time.sleep(POLL_SECONDS)
        self._stores = {members.generation: store}
        return store

    # A new group

    def _form(self, optimizer: Any) -> bool:
        """Form the group of the newest members, again if one is lost meanwhile.

        Return whether this rank has joined the others.
        """
        import torch.distributed as dist

        assert self._model is not None
        if dist.is_initialized():
            self._uses_nccl = "nccl" in dist.get_backend_config()
        base = NCCL_FORMING_SECONDS if self._uses_nccl else FORMING_SECONDS
        factor = 1
        if self.joins:
            self._send(MemberState("ready"))
        while True:
            self._model.leave()  # first: it holds its group
            _leave_group(self._uses_nccl)
            members = self._await_members()
            self.rank, self.size = members.numbers.index(self._number), len(members.numbers)
            if not self._have_come(members):
                continue
            try:
                limit = timedelta(seconds=factor * (base + FORMING_SECONDS_PER_RANK * self.size))
                group = f"distributor/group/{self.generation}"
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if self._uses_nccl else "gloo",
                    store=self._connect(group, members.store, timeout=limit),
                    rank=self.rank,
                    world_size=self.size,
                    timeout=limit,
                )
                limit_group(LIMIT_SECONDS)
                self._catch_up(optimizer)
            except RuntimeError:
                forget_failed_group()
                self._send(MemberState("unformed", generation=members.generation))
                factor *= 4
                continue
            break
        self._send(MemberState("formed", generation=self.generation))
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(self.rank), str(self.size)
        self._model.enter()
        has_joined, self.joins = self.joins, False
        is_void, self.is_void = self.is_void, False
        for follower, saved in self._undo:
            follower.load(saved)
        for follower in self._living_followers():
            follower.on_members(self.rank, self.size)
        self._undo = [(follower, follower.save()) for follower, _ in self._undo]
        self.is_void = is_void
        return has_joined

    def _await_members(self) -> Members:
        """Return members that are newer than the group, and have this rank."""

        def are_new() -> bool:
            newest = self._notice
            return newest.generation > self.generation and self._number in newest.numbers

        with self._news:
            if not are_new():
                self._send(MemberState("waiting", generation=self.generation))
            while not self._news.wait_for(are_new, WAITING_SECONDS):
                # Nobody is lost, but a connection: all form a group again.
                self._send(MemberState("unformed", generation=self.generation))
            former, self._members = self._members, self._notice
            members = self._members
            self.generation, self._has_failed, self._begun = members.generation, False, 0
            if dict(former.since)[self._number] != dict(members.since)[self._number]:
                # It has joined, but the driver did not know yet when another one was lost.
                self.joins, self.steps = True, NEWCOMER
            return members

    def _have_come(self, members: Members) -> bool:
        """Wait until all members form this group; return False if there are newer members."""
        names, began = [f"here/{number}" for number in members.numbers], time.monotonic()
        with contextlib.suppress(RuntimeError):  # the store is lost: newer members follow
            store = self._store_for(members)
            store.set(f"here/{self._number}", "")
            while self._notice.generation <= members.generation:
                if store.check(names):
                    return True
                pause(began)
        return False

    def _catch_up(self, optimizer: Any) -> None:
        """Copy what this member lacks from one that has completed most steps."""
        import torch
        import torch.distributed as dist

        assert self._model is not None
        # After a step that changed nothing, a rank is where those are that make this step again,
        # unless a collective is between them.
        is_in_step = int(self.is_void or not self._is_fresh)
        own = self.steps, is_in_step, self.num_collectives + self._num_reports()
        gathered = [torch.zeros(len(own), dtype=torch.int64) for _ in range(self.size)]
        self._await([dist.all_gather(gathered, torch.tensor(own), async_op=True)])
        places = [tuple(place.tolist()) for place in gathered]
        held = [steps for steps, *_ in places]
        latest, source = max(held), held.index(max(held))
        self._is_ahead = any(place[0] > NEWCOMER and place < own for place in places)
        if latest == NEWCOMER:
            self.refuse("the rank was lost from which the others were copying the state")
        if self.steps == latest and not self._is_fresh:
            self._model.restore_buffers()
        is_source, is_behind, module = source == self.rank, min(held) < latest, self._model.module
        state = known = None
        tensors = [each.data for each in module.buffers()]
        if is_behind:
            optimizer.zero_grad(set_to_none=True)  # the copies take their memory
            tensors += [each.data for each in module.parameters()]
            state = self._state_of_optimizer(optimizer, source)
        copies = tensors if is_source else [torch.empty_like(each) for each in tensors]
        self._broadcast(copies, source)
        if NEWCOMER in held:
            known = self._shared(self._known() if is_source else None, source)
        # Nothing is changed before all has come: if the source is lost, this rank has its own.
        if not is_source:
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
            if state is not None:
                optimizer.load_state_dict(state)
        if self.joins:
            self._take_over(known, latest)
        self.steps = latest

    def _await(self, works: Iterable[Any], seconds: float = math.inf) -> None:
        """Wait for collectives; raise RuntimeError if a member is lost, or after some seconds."""
        began = time.monotonic()
        for work in works:
            while not work.is_completed():
                if self.is_broken or time.monotonic() > began + seconds:
                    raise RuntimeError("a member is lost")
                pause(began, POLL_SECONDS)
            work.wait()

    def _broadcast(self, tensors: Sequence[Any], source: int) -> None:
        """Copy tensors of any type and layout."""
        import torch
        import torch.distributed as dist

        wholes = [each.contiguous() for each in tensors]
        flat = [whole.reshape(-1).view(torch.uint8) for whole in wholes]
        self._await([dist.broadcast(each, source, async_op=True) for each in flat])
        for tensor, whole in zip(tensors, wholes, strict=True):
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)

    def _shared(self, value: Any, source: int) -> Any:
        """Return the object of a rank."""
        import torch

        own = bytearray(cloudpickle.dumps(value) if source == self.rank else b"")
        size = torch.tensor([len(own)])
        self._broadcast([size], source)
        data = torch.frombuffer(own or bytearray(int(size)), dtype=torch.uint8)
        self._broadcast([data], source)
        return pickle.loads(data.numpy().tobytes())

    def _state_of_optimizer(self, optimizer: Any, source: int) -> Any:
        """Return the state of a rank's optimizer; its hyperparameters only if this rank is new.

        Another rank has its own, and its scheduler changes them itself after this step.
        """
        import torch

        found, is_source = optimizer.state_dict(), source == self.rank
        values = {
            (number, name): value
            for number, values in found["state"].items()
            for name, value in values.items()
        }
        kinds = {key for key, value in values.items() if torch.is_tensor(value)}
        plain = {key: _layout_of(each) if key in kinds else each for key, each in values.items()}
        plain, kinds, groups = self._shared((plain, kinds, found["param_groups"]), source)
        tensors = {key: values[key] if is_source else _empty(*plain[key]) for key in sorted(kinds)}
        self._broadcast(list(tensors.values()), source)
        state: dict[int, dict[str, Any]] = {}
        for (number, name), value in (plain | tensors).items():
            state.setdefault(number, {})[name] = value
        return {"state": state, "param_groups": groups if self.joins else found["param_groups"]}

    def _known(self) -> Any:
        """Return what a rank that joins must know."""
        undone = {id(follower): saved for follower, saved in self._undo}
        saved = [undone.get(id(each)) or each.save() for each in self._living_followers()]
        states = [(each.state_dict(), _factors_of(each)) for each in self._schedulers]
        return saved, states, self.num_collectives

    def _take_over(self, known: Any, latest: int) -> None:
        saved, states, self.num_collectives = known
        for follower, each in zip(self._living_followers(), saved, strict=False):
            follower.load(each)
        for scheduler, (state, factors) in zip(list(self._schedulers), states, strict=False):
            scheduler.load_state_dict(state)
            self._schedulers[scheduler] = latest
            if _factors_of(scheduler) != factors:
                self.refuse(
                    f"a {type(scheduler).__name__} of a rank that joins has another function "
                    "(read what differs, such as len(loader), from a State)"
                )

    def _living_followers(self, undone: bool = False) -> list[Follower]:
        known = (reference() for reference, undo in self._followers if undo or not undone)
        return [follower for follower in known if follower is not None]


def pause(began: float, most: float = 0.05) -> None:
    """Sleep for a part of the time since `began`, in monotonic seconds, before another look."""
    time.sleep(min(most, max(POLL_SECONDS, time.monotonic() - began) / 10))


@cache
def _future_type() -> Any:
    from torch.futures import Future  # in each call, it would take as long as the rest

    return Future


def _leave_group(aborts: bool) -> None:
    """Destroy the default process group, if there is one, without waiting for its collectives."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    # The destructor of a group waits for its collectives. They may wait for another survivor, whose
    # own collectives wait for this one.
    groups = process_groups(dist.distributed_c10d)
    if aborts and dist.group.WORLD is not None:
        dist.group.WORLD.abort()  # or NCCL's kernels would wait for ever
    dist.destroy_process_group()
    threading.Thread(target=groups.clear, name="left-group", daemon=True).start()


def _factors_of(scheduler: Any) -> list[Any]:
    """Return what a scheduler's functions are in some steps: its state is without them."""
    factors = []
    for function in getattr(scheduler, "lr_lambdas", ()):
        for ahead in STEPS_AHEAD:
            with contextlib.suppress(Exception):  # after the last step that it knows
                factors.append(function(scheduler.last_epoch + ahead))
    return factors


def _layout_of(tensor: Any) -> tuple[Any, Any, str]:
    return tensor.shape, tensor.dtype, tensor.device.type


def _empty(shape: Any, dtype: Any, device: str) -> Any:
    import torch

    return torch.empty(shape, dtype=dtype, device=device)
