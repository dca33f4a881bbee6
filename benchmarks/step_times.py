"""What counting a rank's steps costs: blocks of steps with the hooks and without, in turn.

Both kinds of blocks are in the same processes, with the same model. The plain ones have none of the
hooks, and torch's own log of DDP at its own rate.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.launch import titled as placed
from benchmarks.measure import Driven, apart
from benchmarks.peers import PEERS, Peer
from benchmarks.report import Row, gathered, row
from benchmarks.spark import LOCAL
from benchmarks.turns import Effort, measured

RANKS = 2
STEPS = 200
"""Steps of a block."""
PAIRS, QUICK_PAIRS, WARM_UPS = 50, 5, 3
SIZE, LAYERS, BATCH = 192, 4, 64
"""Of the model, so that a step takes about 2 ms."""
PLAIN_RATE = 100
"""In how many steps DDP's log has one by default."""
CALLS = 20_000
DEADLINE = 600.0
RATIO, STEP, HOOKS = "steps that are counted, beside plain ones", "a plain step", "hooks of a step"


class Case(NamedTuple):
    """What is compared, in a number of pairs of blocks."""

    peer: Peer
    title: str
    pairs: int


def titled() -> str:
    """Return the title of the case."""
    return f"{placed(LOCAL, RANKS)}, DDP on gloo"


def measure(effort: Effort) -> list[Row]:
    """Measure the cost of counting steps."""
    return measured_in_pairs(effort, titled(), drive, _rows)


def measured_in_pairs(
    effort: Effort,
    title: str,
    drive: Callable[..., dict[str, Any]],
    to_rows: Callable[[Case, list[Driven]], list[Row]],
) -> list[Row]:
    """Measure a case of this project in pairs of blocks."""
    peer = PEERS["ours"]
    if effort.families and peer.family not in effort.families:
        return []
    cases = [Case(peer, title, QUICK_PAIRS if effort.quick else PAIRS)]
    return measured(cases, 1, lambda case: apart(drive, DEADLINE, pairs=case.pairs), to_rows)


def drive(pairs: int) -> dict[str, Any]:
    """Train on two ranks; return rank 0's ratios, and what the hooks of each rank take."""
    from distributor import TorchDistributor

    distributor = TorchDistributor(RANKS, use_gpu=False)
    return of_ranks(distributor.run_all(alternate, pairs), "hooks")


def of_ranks(ranks: Sequence[dict[str, Any]], *names: str) -> dict[str, Any]:
    """Return rank 0's ratios and times of steps, and the named quantities of each rank."""
    first = {name: ranks[0][name] for name in ("ratios", "steps")}
    return first | {name: [rank[name] for rank in ranks] for name in names}


def in_turn(pairs: int, seconds_of: Callable[[bool], float]) -> dict[str, list[float]]:
    """Time pairs of a block with the hooks and one without, in random order.

    Returns
    -------
    dict
        For each pair, the time with the hooks by the time without; milliseconds of a step without
        them.
    """
    order = random.Random(0)  # the same on all ranks
    ratios, steps = [], []
    for pair in range(WARM_UPS + pairs):
        seconds = {kind: seconds_of(kind) for kind in order.sample([True, False], 2)}
        if pair >= WARM_UPS:
            ratios.append(seconds[True] / seconds[False])
            steps.append(1e3 * seconds[False] / STEPS)
    return {"ratios": ratios, "steps": steps}


def alternate(pairs: int) -> dict[str, Any]:
    """Train in blocks with the hooks and without.

    Returns
    -------
    dict
        What `in_turn` returns, and the microseconds that the hooks take in a step by what they
        measure themselves.
    """
    import torch
    import torch.distributed as dist

    from distributor.rank.step_clock import Counters

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = [torch.nn.Linear(SIZE, SIZE) for _ in range(LAYERS)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    batches: Any = torch.rand(STEPS, BATCH, SIZE)
    loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)
    hooks = Hooks(model, loader)

    def seconds_of(counts: bool) -> float:
        hooks.use(counts)
        dist.barrier()
        began = time.perf_counter()
        for batch in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return time.perf_counter() - began

    found = in_turn(pairs, seconds_of)
    hooks.use(True)
    counted = Counters(*hooks.clock._cells)
    if counted.steps != (WARM_UPS + pairs) * STEPS or not counted.waited:
        raise RuntimeError(f"the hooks have counted {counted.steps:g} steps: {counted}")
    dist.destroy_process_group()
    taken = counted.hooks / counted.steps + hooks.seconds_of_wait()
    return {**found, "hooks": 1e6 * taken}


class Hooks:
    """The hooks that count this rank's steps, which can be removed and put back.

    Parameters
    ----------
    model : DistributedDataParallel
        The rank's model.
    loader : DataLoader
        Its loader.
    """

    def __init__(self, model: Any, loader: Any) -> None:
        from torch.optim import optimizer

        from distributor.rank.context import worker_context

        self.clock = worker_context().clock
        self._model = model
        self._of_steps: Any = vars(optimizer)["_global_optimizer_post_hooks"]
        self._counting = dict(self._of_steps)
        self._of_loaders = [
            (owner, name, method)
            for each in (loader, iter(loader))
            for owner in type(each).__mro__
            for name, method in vars(owner).items()
            if name in ("__iter__", "__next__") and hasattr(method, "__wrapped__")
        ]
        names = [hook.__name__ for hook in self._counting.values()]
        if "call_eagerly" not in names or len(self._of_loaders) != 2:
            raise RuntimeError("this rank has other hooks than those that are measured")

    def use(self, counts: bool) -> None:
        """Count the next steps, or have a plain loop."""
        self._of_steps.clear()
        self._of_steps.update(self._counting if counts else {})
        for owner, name, method in self._of_loaders:
            setattr(owner, name, method if counts else method.__wrapped__)
        self._model._set_ddp_runtime_logging_sample_rate(1 if counts else PLAIN_RATE)

    def seconds_of_wait(self) -> float:
        """Return what it takes to count one wait for data."""
        from distributor.rank.step_clock import DATA

        def nothing() -> None:
            pass

        seconds = []
        for function in (self.clock.timing(DATA)(nothing), nothing):
            began = time.perf_counter()
            for _ in range(CALLS):
                function()
            seconds.append((time.perf_counter() - began) / CALLS)
        return seconds[0] - seconds[1]


def interval_of_median(values: Sequence[float], certainty: float = 0.95) -> tuple[float, float]:
    """Return the interval that has the median with this probability, whatever the distribution.

    Its ends are values of the sample: their places follow from the binomial distribution.
    """
    ordered, n = sorted(values), len(values)
    outside, place = 0.5**n, 0  # the probability that fewer than `place + 1` are below the median
    while place < n // 2 and 2 * (more := outside + math.comb(n, place + 1) * 0.5**n) <= (
        1 - certainty
    ):
        outside, place = more, place + 1
    return ordered[place], ordered[n - 1 - place]


def with_interval(ratios: Sequence[float]) -> str:
    """Return the text of the median of ratios, and its interval."""
    low, high = interval_of_median(ratios)
    return f"{statistics.median(ratios):.4f}, 95 % interval {low:.4f} to {high:.4f}"


def _rows(case: Case, measurements: list[Driven]) -> list[Row]:
    ratios = gathered(measurements, "ratios")
    return [
        row(case.peer, case.title, RATIO, ratios, "", with_interval(ratios)),
        row(case.peer, case.title, STEP, gathered(measurements, "steps"), "ms"),
        row(case.peer, case.title, HOOKS, gathered(measurements, "hooks"), "µs", "each rank"),
    ]
