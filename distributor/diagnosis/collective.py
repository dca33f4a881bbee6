"""An all-reduce on real ranks, and its bus bandwidth."""

from __future__ import annotations

import logging
from typing import Any

from distributor.core.resources import format_bytes
from distributor.core.text import counted
from distributor.diagnosis.report import Check, failure, ok, warning
from distributor.launch.output.messages import shown_from
from distributor.torch_distributor import TorchDistributor

NAME = "all-reduce"
SIZE = 16 * 2**20
"""Bytes that the ranks reduce."""
TIMES = 3
START_SECONDS, RUN_SECONDS = 60.0, 60.0
SLOW = {"gloo": 10e6, "nccl": 500e6}
"""Bytes per second of bus bandwidth below which an all-reduce is slow."""


class _Untracked(TorchDistributor):
    """Leaves no run in MLflow."""

    is_tracked = False


def check_all_reduce(
    ranks: int, where: str, *, local_mode: bool, use_gpu: bool, **settings: Any
) -> Check:
    """Run ranks that reduce a tensor, and return the bus bandwidth as a check.

    Parameters
    ----------
    ranks : int
        The number of ranks.
    where : str
        How the report names where the ranks run.
    local_mode, use_gpu : bool
        As for `TorchDistributor`.
    **settings
        More settings of it.
    """
    backend = "nccl" if use_gpu else "gloo"
    try:
        with shown_from(logging.ERROR):
            seconds = _Untracked(
                ranks,
                local_mode=local_mode,
                use_gpu=use_gpu,
                start_timeout=START_SECONDS,
                timeout=RUN_SECONDS,
                show_output="none",
                log_dir=None,
                warm=False,  # which leaves no warm process behind
                max_failures=0,
                **settings,
            ).run(all_reduce, backend, SIZE // 4, TIMES)
    except Exception as error:
        text = str(error).strip()
        fix = f"The error of the run says more; {_HINTS[backend]}."
        return failure(NAME, f"{backend}: {type(error).__name__}: {text[:1000]}", fix, where)
    bandwidth = 2 * (ranks - 1) / ranks * SIZE / seconds
    found = (
        f"{backend}, {counted(ranks, 'rank')}, {format_bytes(SIZE)}: bus bandwidth "
        f"{format_bytes(bandwidth)}/s"
    )
    if ranks > 1 and bandwidth < SLOW[backend]:
        return warning(NAME, f"Slow: {found}.", f"Check the network; {_HINTS[backend]}.", where)
    return ok(NAME, found, where)


_HINTS = {
    "gloo": "GLOO_SOCKET_IFNAME chooses gloo's network interface",
    "nccl": "NCCL_DEBUG=INFO shows NCCL's choices, and NCCL_SOCKET_IFNAME its interface",
}


def all_reduce(backend: str, numbers: int, times: int) -> float:
    """Return the seconds of the fastest of some all-reduces. Runs on the ranks."""
    import os
    import time

    import torch
    import torch.distributed as dist

    dist.init_process_group(backend)
    on_gpu = backend == "nccl"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    tensor = torch.ones(numbers, device="cuda" if on_gpu else "cpu")
    found = []
    for _ in range(times + 1):  # the first one also connects
        dist.barrier()
        begun = time.monotonic()
        dist.all_reduce(tensor)
        tensor[0].item()  # waits for the GPU
        found.append(time.monotonic() - begun)
        tensor.fill_(1)
    dist.destroy_process_group()
    return min(found[1:])
