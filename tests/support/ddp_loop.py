"""Runs one short DDP program again and again, started in four ways, and counts the runs that hang.

``python -m support.ddp_loop --times 100 --busy 1`` (with ``tests`` on the path) runs all four:

- ``warm`` and ``fresh``: `TorchDistributor`, with and without a warm process;
- ``forked``: bare forks of a process that has imported ``torch._dynamo``, without this package;
- ``torchrun``, and ``torchrun-early``, in which ranks import ``torch._dynamo`` before they
  initialize their process group.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import cloudpickle
import torch

from distributor import RunTimeout, TorchDistributor
from support.ports import free_port

cloudpickle.register_pickle_by_value(sys.modules[__name__])
RANKS = 2
STEPS = 20
DEADLINE = 30.0
"""Seconds after which a run counts as hanging."""
MODULE = "torch._dynamo"
"""Without it, what imports it later owns the default group for good, by accident."""


def train(model: torch.nn.Module | None) -> torch.nn.Module:
    """Train a small model with DDP, as the first page of a tutorial does."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = model or torch.nn.Linear(8, 1)
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        replica(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()
    return model


def launched(warm: bool) -> Callable[[], bool]:
    """Run the program twice with `TorchDistributor`; the second run continues from the first."""
    distributor = TorchDistributor(
        RANKS, local_mode=True, use_gpu=False, warm=warm, preload=[MODULE], timeout=DEADLINE
    )

    def run() -> bool:
        try:
            distributor.run(train, distributor.run(train, None))
        except RunTimeout as error:
            print(error, file=sys.stderr)
            return False
        return True

    return run


def forked() -> bool:
    """Run the program in two forks of this process; return True if both ended in time."""
    ranks = []
    port = free_port()
    for rank in range(RANKS):
        if not (pid := os.fork()):
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1")
            os.environ.update(MASTER_PORT=str(port), OMP_NUM_THREADS="1")
            torch.set_num_threads(1)
            train(None)
            os._exit(0)
        ranks.append(pid)
    deadline, running = time.monotonic() + DEADLINE, set(ranks)
    while running and time.monotonic() < deadline:
        running -= {rank for rank in running if os.waitpid(rank, os.WNOHANG)[0]}
        time.sleep(0.005)
    for rank in running:
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
    return not running


def torchrun(*flags: str) -> Callable[[], bool]:
    """Run the program under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), __file__, "--rank", *flags]

    def run() -> bool:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            return process.wait(DEADLINE) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return False

    return run


WAYS: dict[str, Callable[[], Callable[[], bool]]] = {
    "warm": lambda: launched(True),
    "fresh": lambda: launched(False),
    "forked": lambda: forked,
    "torchrun": torchrun,
    "torchrun-early": lambda: torchrun("--early"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="runs of each way")
    parser.add_argument("--ways", default=",".join(WAYS), help="which, separated by commas")
    parser.add_argument("--busy", type=int, default=1, help="processes that keep a core busy each")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--early", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.early:
        __import__(MODULE)
    if options.rank:
        train(None)
        return
    __import__(MODULE)
    torch.set_num_threads(1)
    hung: Counter[str] = Counter()
    runs = {way: WAYS[way]() for way in options.ways.split(",")}
    with ExitStack() as ending:
        for _ in range(options.busy):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            ending.callback(busy.kill)
        for count in range(1, options.times + 1):
            for way, run in runs.items():
                hung[way] += not run()
            if count % 100 == 0 or count == options.times:
                print(count, {way: hung[way] for way in runs}, flush=True)


if __name__ == "__main__":
    main()
