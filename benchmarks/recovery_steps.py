"""What recovery in place costs while no rank is lost: blocks of steps with it and in DDP, in turn.

Both kinds of blocks are in the same processes, with models of the same size. Its hooks are measured
beside torch's own communication hook in Python, which does the same for a rank that cannot be lost.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.launch import titled as placed
from benchmarks.measure import Driven, apart
from benchmarks.peers import PEERS, Peer
from benchmarks.report import Row, gathered, row
from benchmarks.spark import LOCAL
from benchmarks.step_times import (
    DEADLINE,
    PAIRS,
    QUICK_PAIRS,
    RANKS,
    STEP,
    STEPS,
    WARM_UPS,
    Case,
    with_interval,
)
from benchmarks.turns import Effort, measured

SIZE, LAYERS, BATCH = 384, 4, 96
"""Of the model, so that a step takes about 10 ms, and has two buckets of gradients."""
RATIO = "steps with recovery in place, beside those of DDP"
HOOKS = "hooks of a step, by the number of buckets"
TORCH = Peer("floor_allreduce_hook", "floor: torch's allreduce_hook", PEERS["ours"].open, "torch")


def titled() -> str:
    """Return the title of the case."""
    return f"{placed(LOCAL, RANKS)}, a model of {LAYERS} layers in DDP on gloo"


def measure(effort: Effort) -> list[Row]:
    """Measure the cost of recovery in place."""
    peer = PEERS["ours"]
    if effort.families and peer.family not in effort.families:
        return []
    cases = [Case(peer, QUICK_PAIRS if effort.quick else PAIRS)]
    return measured(cases, 1, lambda case: apart(drive, DEADLINE, pairs=case.pairs), _rows)


def drive(pairs: int) -> dict[str, Any]:
    """Train on two ranks; return rank 0's ratios, and what the hooks of each rank take."""
    from distributor import TorchDistributor

    distributor = TorchDistributor(RANKS, use_gpu=False, recovery="in_place", max_failures=1)
    ranks = distributor.run_all(alternate, pairs)
    return {
        "ratios": ranks[0]["ratios"],
        "steps": ranks[0]["steps"],
        **{name: [rank[name] for rank in ranks] for name in ("hooks", "torch's hook")},
    }


def alternate(pairs: int) -> dict[str, Any]:
    """Train in blocks with recovery in place and without; the order within a pair is random.

    Returns
    -------
    dict
        For each pair, the time with it by the time without; milliseconds of a step without it;
        microseconds of CPU time that the hooks of both kinds take in a step, by bucket.
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

    order = random.Random(0)  # the same on all ranks
    ratios, steps = [], []
    for pair in range(WARM_UPS + pairs):
        found = {
            recovers: seconds_of(model, own) if recovers else seconds_without(plain)
            for recovers in order.sample([True, False], 2)
        }
        if pair >= WARM_UPS:
            ratios.append(found[True] / found[False])
            steps.append(1e3 * found[False] / STEPS)

    ours, torchs = Clock(), Clock()
    hooks.time(ours)
    seconds_of(model, own)
    timed = torchs.timed(allreduce_hook)
    plain.register_comm_hook(None, lambda group, bucket: timed(group, bucket))
    seconds_without(plain)
    if hooks.membership.refusal is not None:
        raise RuntimeError(f"these steps have no recovery in place: {hooks.membership.refusal}")
    return {
        "ratios": ratios,
        "steps": steps,
        "hooks": 1e6 * ours.seconds / ours.calls["reduce"],
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
        for name in ("reduce", "begin_forward", "_release"):  # the last one on gloo's thread
            setattr(self.membership, name, clock.timed(getattr(self.membership, name)))
        self._model.leave()
        self._model.enter()


def _rows(case: Case, measurements: list[Driven]) -> list[Row]:
    ratios = gathered(measurements, "ratios")
    hooks, torchs = gathered(measurements, "hooks"), gathered(measurements, "torch's hook")
    return [
        row(case.peer, titled(), RATIO, ratios, "", with_interval(ratios)),
        row(case.peer, titled(), STEP, gathered(measurements, "steps"), "ms"),
        row(case.peer, titled(), HOOKS, hooks, "µs", "each rank, with torch's start of allreduce"),
        row(TORCH, titled(), HOOKS, torchs, "µs", "each rank, its part in Python"),
    ]
