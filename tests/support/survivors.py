"""A training that loses ranks while the others go on, its history, and the same without processes.

Each rank writes a line for each iteration to a file of its process: the state that it begins with,
and its samples. `history_of` finds those of the steps that were completed, and `replay` makes these
again in one process. Shares of the data are multiples of all numbers of ranks, so that no sample is
repeated to fill one up.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from distributor.train import Checkpoint, collective, report
from distributor.train.torch import State, prepare_data_loader, prepare_model

BATCH, ROWS = 12, 240
STEPS_OF_REPORT = 3
SETTLING = 10
"""Steps after which the driver knows of ranks that have joined."""
EXIT_CODE = 3
NUM_PRINTED = 2**19
"""Bytes that a rank prints before it raises: more than an agent passes on at once."""
PAUSE = 0.002
"""Seconds of a step, so that the survivors leave the cores to a process that starts."""


@dataclass(frozen=True)
class Fault:
    """What ends a rank in a step of its program.

    Parameters
    ----------
    number, step : int
        The rank's number when it began, and the step.
    moment : str
        When it is: "forward", "step" (the optimizer's) or "report".
    delay : float or None
        Seconds from then until another thread kills the process; None kills it at once.
    raises, hangs : bool
        Whether the program raises an exception instead, or does nothing any more.
    lingers : float
        Seconds for which the process is ending, as if the kernel freed much memory; 0 kills it. If
        it raises, a thread goes on for so long.
    above : str
        A part of the command line of a process above the rank, which is killed instead of it.
    """

    number: int
    step: int
    moment: str = "forward"
    delay: float | None = None
    raises: bool = False
    hangs: bool = False
    lingers: float = 0.0
    above: str = ""

    def marker(self, folder: Path) -> Path:
        """Return the file that shows that it has happened."""
        return folder / f"fault.{self.number}.{self.step}"

    def inject(self, moment: str, folder: Path) -> None:
        """End this rank, once, if it is the moment."""
        if moment != self.moment or self.marker(folder).exists():
            return
        self.marker(folder).write_text(str(os.getpid()))
        if self.raises:
            threading.Thread(target=time.sleep, args=[self.lingers]).start()
            print("." * NUM_PRINTED)
            raise ValueError("on purpose")
        if self.hangs:
            time.sleep(1000)
        if self.lingers:
            threading.Thread(target=self._end_late, args=[folder]).start()
            end_thread = {"x86_64": 60, "aarch64": 93}[platform.machine()]
            ctypes.CDLL(None).syscall(end_thread, EXIT_CODE)
        victim = psutil.Process()
        if self.above:
            lines = {each: " ".join(each.cmdline()) for each in victim.parents()}
            victim = next(each for each, line in lines.items() if self.above in line)
        if self.delay is None:
            victim.kill()
            time.sleep(10)  # in which this process ends too
        else:
            threading.Timer(self.delay, victim.kill).start()

    def _end_late(self, folder: Path) -> None:
        time.sleep(self.lingers)
        (folder / "ended").write_text(str(time.monotonic()))
        os._exit(EXIT_CODE)


class Record(NamedTuple):
    """An iteration of a rank: what it began with, and the rows of its batch."""

    at: float
    pid: int
    number: int
    step: int
    epoch: int
    rank: int
    size: int
    digest: str
    buffers: list[Any]
    rows: list[int]


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer, LRScheduler]:
    """Return a model, its optimizer and its scheduler."""
    torch.manual_seed(0)
    # No bias: before BatchNorm1d its gradients are noise, of which Adam makes steps.
    layers = torch.nn.Linear(4, 4, bias=False), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    module = torch.nn.Sequential(*layers).double()
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    # Its constructor makes no step of its own; the others' do.
    schedulers = [LinearLR(optimizer, 0.5, total_iters=4), StepLR(optimizer, 5, 0.95)]
    return module, optimizer, SequentialLR(optimizer, schedulers, [4])


def rows() -> TensorDataset:
    """Return the numbers of rows, inputs and targets."""
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(torch.arange(ROWS), x, x.square().sum(1, keepdim=True))


def parts_of(size: int, accumulates: bool) -> list[slice]:
    """Return the batches whose gradients are accumulated; BatchNorm needs more than one row."""
    middle = size // 2
    return [slice(middle), slice(middle, size)] if accumulates and middle > 1 else [slice(size)]


def digest(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler
) -> str:
    """Return a digest of all bits of the state."""
    found = hashlib.sha256(repr(sorted(scheduler.state_dict().items())).encode())
    saved = optimizer.state_dict()
    found.update(repr(saved["param_groups"]).encode())
    moments = [each for state in saved["state"].values() for each in state.values()]
    for tensor in (*module.state_dict().values(), *moments):
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def train_on(
    folder: Path,
    faults: Sequence[Fault] = (),
    epochs: int = 2,
    size: int = 0,
    saved: Path | None = None,
    keep_global_batch: bool = False,
    accumulates: bool = False,
) -> dict[str, Any]:
    """Train for some epochs, and until there are as many ranks again; faults wait for these too.

    With `accumulates`, each step has the gradients of two batches. With a folder `saved`, there are
    collectives after some steps, and a report; every other one has a checkpoint of rank 0.
    """
    torch.set_num_threads(1)
    number, logs = int(os.environ["RANK"]), folder / os.environ["TORCHELASTIC_RESTART_COUNT"]
    logs.mkdir(exist_ok=True)
    module, optimizer, scheduler = parts()
    model = prepare_model(module)
    own = DataLoader(rows(), batch_size=BATCH, shuffle=True)
    loader = prepare_data_loader(own, keep_global_batch=keep_global_batch)
    state = State(epoch=0, step=0)
    now: dict[str, Any] = {}
    settled = turn = 0  # steps since there are as many ranks, and the step of the next faults

    def note(*_: object) -> None:
        if now.get("is noted"):
            return
        now["is noted"] = True
        buffers = [buffer.tolist() for buffer in module.buffers()]
        now.update(digest=digest(module, optimizer, scheduler), buffers=buffers)

    module.register_forward_pre_hook(note)
    with open(logs / f"{number}.{os.getpid()}.log", "a", buffering=1) as log:
        while state.epoch < epochs or dist.get_world_size() < size:
            for numbers, x, y in loader:
                optimizer.zero_grad()
                *first, last = parts_of(len(x), accumulates)
                for part in first:
                    with model.no_sync():
                        (model(x[part]) - y[part]).square().mean().backward()
                loss = (model(x[last]) - y[last]).square().mean()
                del now["is noted"]
                step = state.step  # the call of the model may have undone a change of it
                now.update(at=time.monotonic(), pid=os.getpid(), number=number, step=step)
                now.update(rank=dist.get_rank(), size=dist.get_world_size(), epoch=state.epoch)
                log.write(json.dumps(Record(**now, rows=numbers.tolist())) + "\n")
                left = [fault for fault in faults if not fault.marker(folder).exists()]
                before, turn = turn, min((fault.step for fault in left), default=step)
                is_same = turn == before and dist.get_world_size() >= size
                settled = settled + 1 if is_same else 0
                due = [each for each in left if each.number == number and each.step == turn <= step]
                due = due if size == 0 or settled > SETTLING else []
                for fault in due:
                    fault.inject("forward", folder)
                loss.backward()
                for fault in due:
                    fault.inject("step", folder)
                optimizer.step()
                scheduler.step()
                state.step += 1
                time.sleep(PAUSE)
                if saved is not None and state.step % STEPS_OF_REPORT == 0:
                    for fault in due:
                        fault.inject("report", folder)
                    report_steps(saved, state)
            state.epoch += 1
    return {
        "pid": os.getpid(),
        "number": number,
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "environment": [int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])],
        "steps": state.step,
        "optimizer's": {int(each["step"]) for each in optimizer.state.values()},
        "schedule": (scheduler.last_epoch, scheduler.get_last_lr()),
        "parameters": [parameter.tolist() for parameter in module.parameters()],
    }


def report_steps(saved: Path, state: State) -> None:
    """Make collectives, and report how many steps are done."""
    collective.barrier()
    assert collective.broadcast_from_rank_zero(state.epoch) == state.epoch
    if dist.get_rank() == 0:
        (saved / "steps").write_text(str(state.step))
    saves = dist.get_rank() == 0 and state.step % (2 * STEPS_OF_REPORT) == STEPS_OF_REPORT
    checkpoint = Checkpoint.from_directory(saved) if saves else None
    report({"epoch": state.epoch, "steps": state.step}, checkpoint=checkpoint)


def records_in(folder: Path) -> list[Record]:
    """Return what all processes of the first attempt have written, in the order of the time."""
    texts = [path.read_text() for path in (folder / "0").glob("*.log")]
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    return sorted(Record(*json.loads(line)) for line in lines if line.endswith("\n"))


def history_of(records: Sequence[Record], steps: int) -> list[list[Record]]:
    """Return the iterations of each completed step by rank: the last ones that had its number.

    A process that waits to join has a group of its own, which is none of the run's.
    """
    history = []
    for step in range(steps):
        found = [each for each in records if each.step == step and each.size > 1]
        size = found[-1].size
        latest = {each.rank: each for each in found if each.size == size}
        assert sorted(latest) == list(range(size)), f"step {step} has all of its ranks"
        history.append([latest[rank] for rank in range(size)])
    return history


def replay(history: Sequence[Sequence[Record]], accumulates: bool = False) -> list[Any]:
    """Make the steps again; return the parameters."""
    module, optimizer, scheduler = parts()
    _, x, y = rows().tensors
    buffers = list(module.buffers())
    ends = {each.pid: [buffer.clone() for buffer in buffers] for each in history[0]}
    for step in history:
        # Ranks have the buffers of rank 0 of the step before; or, if the members have changed,
        # perhaps more than once, those of any rank that was there.
        same = [each.pid for each in step] == list(ends)
        sources = [step[0].pid] if same else list(ends)
        starts = [ends[pid] for pid in sources if near(ends[pid], step[0].buffers)]
        assert starts, f"the buffers in step {step[0].step} are not those after the one before"
        start, ends = starts[0], {}
        optimizer.zero_grad()
        for each in step:
            for buffer, before in zip(buffers, start, strict=True):
                buffer.copy_(before)
            for part in parts_of(len(each.rows), accumulates):
                own = each.rows[part]
                (module(x[own]) - y[own]).square().mean().backward()
            ends[each.pid] = [buffer.clone() for buffer in buffers]
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad /= len(step)
        optimizer.step()
        scheduler.step()
    return [parameter.tolist() for parameter in module.parameters()]


def near(found: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether tensors are equal, but for the order in which gradients are added."""
    pairs = zip(found, others, strict=True)
    doubles = [[torch.as_tensor(each, dtype=torch.float64) for each in pair] for pair in pairs]
    return all(torch.allclose(*pair, rtol=1e-6, atol=1e-6) for pair in doubles)


def check(
    folder: Path, values: Sequence[dict[str, Any]], accumulates: bool = False
) -> list[list[Record]]:
    """Check that no step is lost, and that all members have the same; return the history."""
    values = sorted(values, key=lambda value: int(value["rank"]))
    [steps] = {value["steps"] for value in values}
    records = records_in(folder)
    assert steps == 1 + max(each.step for each in records)
    history = history_of(records, steps)
    for step in history:
        assert len({each.digest for each in step}) == 1, f"step {step[0].step} begins alike"
    assert [value["rank"] for value in values] == list(range(len(values)))
    for value in values:
        assert value["optimizer's"] == {steps}
        assert value["environment"] == [value["rank"], value["size"]]
        assert value["size"] == len(history[-1])
        for name in ("schedule", "parameters"):
            assert value[name] == values[0][name]
    assert values[0]["schedule"][0] == steps
    for epoch in {each.epoch for each in records}:
        members = [each for step in history for each in step if each.epoch == epoch]
        used = [row for each in members for row in each.rows]
        assert sorted(used) == list(range(ROWS)), f"epoch {epoch} has each row once"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them only wait for each other
    assert near(replay(history, accumulates), values[0]["parameters"])
    torch.set_num_threads(threads)
    return history
