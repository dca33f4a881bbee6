"""What recovery in place costs while no rank is lost: blocks of steps with it and in DDP, in turn.

Both kinds of blocks are in the same processes, with models of the same size. Its hooks are measured
beside torch's own communication hook in Python, which does the same for a rank that cannot be lost.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.launch import titled as placed
from benchmarks.measure import Driven
from benchmarks.peers import PEERS, Peer
from benchmarks.report import Row, gathered, row
from benchmarks.spark import LOCAL
from benchmarks.step_times import (
    RANKS,
    STEP,
    STEPS,
    Case,
    in_turn,
    measured_in_pairs,
    of_ranks,
    with_interval,
)
from benchmarks.turns import Effort

SIZE, LAYERS, BATCH = 384, 4, 96
"""Of the model, so that a step takes about 10 ms, and has two buckets of gradients."""
RATIO = "steps with recovery in place, beside those of DDP"
HOOKS = "hooks of a step, by the number of buckets"
OWN = f"{HOOKS}, without torch's multiplication and start of allreduce"
TORCH = Peer("floor_allreduce_hook", "floor: torch's allreduce_hook", PEERS["ours"].open, "torch")


def titled() -> str:
    """Return the title of the case."""
    return f"{placed(LOCAL, RANKS)}, a model of {LAYERS} layers in DDP on gloo"


def measure(effort: Effort) -> list[Row]:
    """Measure the cost of recovery in place."""
    return measured_in_pairs(effort, titled(), drive, _rows)


def drive(pairs: int) -> dict[str, Any]:
    """Train on two ranks; return rank 0's ratios, and what the hooks of each rank take."""
    from distributor import TorchDistributor

    distributor = TorchDistributor(RANKS, use_gpu=False, recovery="in_place", max_failures=1)
    return of_ranks(distributor.run_all(alternate, pairs), "hooks", "own", "torch's hook")


def alternate(pairs: int) -> dict[str, Any]:
    """Train in blocks with recovery in place and without.

    Returns
    -------
    dict
        What `in_turn` returns, and the microseconds of CPU time that the hooks of both kinds take
        in a step, by bucket; for ours, also without what DDP does for a bucket as well.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    from distributor.train.torch import prepare_model

    def made() -> Any:
        return torch.nn.Sequential(*[torch.nn.Linear(SIZE, SIZE) for _ in range(LAYERS)])

    torch.set_num_threads(1)
    model, plain = prepare_model(made()), DistributedDataParallel(made())
    own = torch.optim.SGD(model.parameters(), 1e-3)  # the only one that the hooks may know
    batch, hooks = torch.rand(BATCH, SIZE), Hooks(model)

    def seconds_of(trained: Any, optimizer: Any) -> float:
        """Return what a block takes."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(STEPS):
            optimizer.zero_grad()
            trained(batch).square().mean().backward()
            optimizer.step()
        return time.perf_counter() - began

    def seconds_without(trained: Any) -> float:
        with hooks.removed():
            return seconds_of(trained, torch.optim.SGD(trained.parameters(), 1e-3))

    found = in_turn(pairs, lambda kind: seconds_of(model, own) if kind else seconds_without(plain))
    ours, parts, torchs = Clock(), Clock(), Clock()
    hooks.time(ours)
    seconds_of(model, own)
    whole = 1e6 * ours.seconds / ours.calls["reduce"]
    hooks.time_parts(parts)
    seconds_of(model, own)
    timed = torchs.timed(allreduce_hook)
    plain.register_comm_hook(None, lambda group, bucket: timed(group, bucket))
    seconds_without(plain)
    if hooks.membership.refusal is not None:
        raise RuntimeError(f"these steps have no recovery in place: {hooks.membership.refusal}")
    return {
        **found,
        "hooks": whole,
        "own": whole - 1e6 * parts.seconds / parts.calls["allreduce"],
        "torch's hook": 1e6 * torchs.seconds / torchs.calls["allreduce_hook"],
    }


class Clock:
    """Sums the CPU time of functions, on any thread."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls: Counter[str] = Counter()

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time counted."""

        def call(*arguments, **named):  # type: ignore[no-untyped-def]
            began = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += time.thread_time() - began
                self.calls[function.__name__] += 1

        return call


class Timed:
    """The methods of an object, with their time counted.

    Parameters
    ----------
    target : object
        The object.
    clock : Clock
        Counts their time.
    """

    def __init__(self, target: Any, clock: Clock) -> None:
        self._target, self._clock = target, clock

    def __getattr__(self, name: str) -> Any:
        return self._clock.timed(getattr(self._target, name))


class TimedBucket(Timed):
    """A bucket of gradients whose tensor's methods are timed."""

    def buffer(self) -> Timed:
        return Timed(self._target.buffer(), self._clock)


class Hooks:
    """The hooks of recovery in place on this rank.

    Parameters
    ----------
    model : Module
        The model from ``prepare_model``.
    """

    def __init__(self, model: Any) -> None:
        from torch.optim import optimizer

        from distributor.rank.context import worker_context

        self.membership: Any = worker_context().membership
        self._model = model
        names = "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"
        self._of_steps: list[tuple[dict[Any, Any], Any]] = [
            (hooks, key)
            for hooks in (vars(optimizer)[name] for name in names)
            for key, hook in hooks.items()
            if getattr(hook, "__self__", None) is self.membership
        ]
        if len(self._of_steps) != len(names):
            raise RuntimeError("this rank has other hooks than those that are measured")

    @contextlib.contextmanager
    def removed(self) -> Iterator[None]:
        """Train a model in plain DDP meanwhile."""
        removed = [hooks.pop(key) for hooks, key in self._of_steps]
        yield
        for (hooks, key), hook in zip(self._of_steps, removed, strict=True):
            hooks[key] = hook

    def time(self, clock: Clock) -> None:
        """Count the time of all hooks from now on."""
        for hooks, key in self._of_steps:
            hooks[key] = clock.timed(hooks[key])
        for name in ("reduce", "begin_forward", "_end"):  # the last one on gloo's thread
            setattr(self.membership, name, clock.timed(getattr(self.membership, name)))
        self._wrap_again()

    def time_parts(self, clock: Clock) -> None:
        """Count the time of what DDP does for a bucket as well, from now on."""
        reduce = self.membership.reduce
        self.membership.reduce = lambda group, bucket: reduce(
            Timed(group, clock), TimedBucket(bucket, clock)
        )
        self._wrap_again()

    def _wrap_again(self) -> None:
        self._model.leave()
        self._model.enter()


def _rows(case: Case, measurements: list[Driven]) -> list[Row]:
    ratios = gathered(measurements, "ratios")
    hooks, own = gathered(measurements, "hooks"), gathered(measurements, "own")
    torchs = gathered(measurements, "torch's hook")
    return [
        row(case.peer, case.title, RATIO, ratios, "", with_interval(ratios)),
        row(case.peer, case.title, STEP, gathered(measurements, "steps"), "ms"),
        row(
            case.peer, case.title, HOOKS, hooks, "µs", "each rank, with torch's start of allreduce"
        ),
        row(case.peer, case.title, OWN, own, "µs", "each rank"),
        row(TORCH, case.title, HOOKS, torchs, "µs", "each rank, its part in Python"),
    ]
