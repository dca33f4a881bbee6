"""Runs work on kernels and sandboxes that refuse newer system calls, and a warning says so."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable

import pytest
from conftest import facts_in
from support.waiting import assert_gone

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
        reason="the tests know the numbers of system calls on two architectures",
    ),
]
RunDriver = Callable[..., "subprocess.CompletedProcess[str]"]

PIDFD, MEMFD = ("pidfd_open", "pidfd_send_signal"), ("memfd_create",)
REFUSING = """
def refuse(names, error):
    import ctypes, errno, platform, struct

    memfd_create = 319 if platform.machine() == "x86_64" else 279
    numbers = {{"pidfd_open": 434, "pidfd_send_signal": 424, "memfd_create": memfd_create}}
    load, equal, give_back, allow, fail = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
    steps = [(load, 0, 0, 0)]
    for name in names:
        steps += [(equal, 0, 1, numbers[name]), (give_back, 0, 0, fail | getattr(errno, error))]
    steps.append((give_back, 0, 0, allow))
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    # struct sock_fprog: the number of steps, and their address
    filtered = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(program)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    if prctl(no_new_privileges, 1, 0, 0, 0) or prctl(set_seccomp, mode_filter, filtered, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")

refuse({names!r}, {error!r})
"""
"""Has the kernel refuse system calls of these names from then on, as old ones and sandboxes do."""
RUNS = """
import json, logging, os, signal, subprocess, sys, time

logging.basicConfig(format="WARNED %(message)s", level=logging.WARNING)

from distributor import TorchDistributor

def run(function, *args, timeout=100.0):
    ranks = TorchDistributor(2, use_gpu=False, warm=sys.argv[1] == "warm", timeout=timeout)
    try:
        value = ranks.run(function, *args)
        return {"value": value}
    except Exception as error:
        facts = {"error": type(error).__name__, "stacks": len(getattr(error, "stacks", {}))}
        return {**facts, "signal": getattr(error, "signal", None)}

def add(given):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = given.clone()
    dist.all_reduce(total)
    stray = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
    dist.destroy_process_group()
    return total, stray

def fail():
    raise KeyError(os.environ["RANK"])

def die():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)

def sleep():
    time.sleep(100)

import torch

total, stray = run(add, torch.ones(300_000))["value"]
facts = {"sum": total.sum().item(), "stray": stray}
facts["ends"] = [run(fail), run(die), run(sleep, timeout=1.0)]
print("FACTS " + json.dumps(facts))
"""
ENDS = [
    {"error": "KeyError", "signal": None, "stacks": 0},
    {"error": "WorkerDied", "signal": 9, "stacks": 0},
    {"error": "RunTimeout", "signal": None, "stacks": 2},
]
LOSSES = {
    PIDFD: ("lacks pidfd_open ({}). Each rank starts a new Python interpreter",),
    MEMFD: ("lacks memfd_create ({}). Values and reports of ranks are written to temporary",),
}
LOSSES[PIDFD + MEMFD] = LOSSES[PIDFD] + LOSSES[MEMFD]
MESSAGES = {"ENOSYS": "Function not implemented", "EPERM": "Operation not permitted"}


@pytest.mark.parametrize(
    ("names", "error", "start"),
    [(PIDFD, "ENOSYS", "warm"), (MEMFD, "EPERM", "warm"), (PIDFD + MEMFD, "EPERM", "fresh")],
)
def test_local_runs_work(
    names: tuple[str, ...], error: str, start: str, run_driver: RunDriver
) -> None:
    done = run_driver(REFUSING.format(names=names, error=error) + RUNS, start)

    facts = facts_in(done)
    assert facts["sum"] == 600_000
    assert facts["ends"] == ENDS
    assert_gone([facts["stray"]])
    warned = [line for line in done.stderr.splitlines() if line.startswith("WARNED On ")]
    assert len(warned) == len(LOSSES[names]), done.stderr
    for loss, line in zip(LOSSES[names], warned, strict=True):
        assert loss.format(MESSAGES[error]) in line
