"""The state of a rank that its program can reach: one object for each process."""

from __future__ import annotations

import hmac
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from distributor.core.addresses import joined
from distributor.errors import DistributorError
from distributor.rank import messages
from distributor.rank.step_clock import StepClock

if TYPE_CHECKING:
    import torch

    from distributor.rank.membership import Membership


class PreemptionNotices:
    """Passes on the notices that a rank receives, and takes its first SIGTERM as one."""

    def __init__(self, send: Callable[[bytes], object]) -> None:
        self._send = send  # to the rank's agent, which sends a notice on to all ranks
        self._lock = threading.Lock()
        self._notices: list[bool] = []
        self._callbacks: list[Callable[[bool], object]] = []

    def notify(self, here: bool) -> None:
        """Receive a notice about a process of this host, or another. Any thread can call it."""
        with self._lock:
            self._notices.append(here)
            for callback in self._callbacks:
                callback(here)

    def subscribe(self, callback: Callable[[bool], object]) -> None:
        """Call `callback` with `here` for each notice, also for those that have come already."""
        with self._lock:
            self._callbacks.append(callback)
            for here in self._notices:
                callback(here)
        self._send(messages.SUBSCRIBED)
        self._survive_sigterm()

    def _survive_sigterm(self) -> None:
        """Take the first SIGTERM as a notice, unless the program has a handler of its own."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._send(messages.IGNORES_SIGTERM)
            signal.signal(signal.SIGTERM, self._on_sigterm)
            os.register_at_fork(after_in_child=self._restore_sigterm)

    def _on_sigterm(self, *_: object) -> None:
        self._restore_sigterm()
        self._send(messages.SIGTERM_RECEIVED)

    def _restore_sigterm(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class WorkerContext:
    """What a rank reports, receives and has still to do; outside a rank, it does nothing.

    `node.worker.main` creates it before the program starts. A process that the program forks
    inherits it, and its metrics count as the rank's; one that it starts otherwise is no rank.
    """

    def __init__(
        self,
        send_control: Callable[[bytes], object] = lambda message: None,
        progress_file: int | None = None,
        clock: StepClock | None = None,
    ) -> None:
        self.preemption_notices = PreemptionNotices(send_control)
        self.clock = clock or StepClock()  # what this process spends its time on
        self.completed_steps = 0  # reports, in earlier attempts too
        self.uses_gpus = True  # if not, this process may still see some
        self.rendezvous: tuple[str, int] = ("", 0)  # of rank 0's store, whatever the program sets
        self.store: object = None  # kept while the process lives: shutting it down takes time
        self.secret = b""  # authenticates ranks in that store, which anybody can write to
        self.membership: Membership | None = None  # if survivors of a lost rank go on
        self.scratch = ""  # a folder that is removed after the rank, even if the rank is killed
        self.data: int | None = None  # descriptor of the node's part of the run's datasets
        # Called with a bound method that returns a data loader's position, which each checkpoint
        # then contains, and the loader's name. Returns the position to resume from, or None.
        self.register_loader: Callable[[Callable[[], Any], str | None], Any] | None = None
        self._progress_file = progress_file  # the agent reads it
        self._final_steps: list[Callable[[], object]] = []

    @property
    def num_steps(self) -> int:
        """The steps of the optimizer, if survivors of a lost rank go on; else, the reports."""
        members = self.membership
        return self.completed_steps if members is None or members.refusal else max(0, members.steps)

    @property
    def is_rank(self) -> bool:
        return self._progress_file is not None

    def send(self, update: messages.Record) -> None:
        """Send progress or a report to the driver, at the cost of one small write."""
        if self._progress_file is not None:
            os.write(self._progress_file, messages.line_of(update))

    def add_final_step(self, step: Callable[[], object]) -> None:
        """Call `step` once the program has returned; if it raises, the rank has failed."""
        self._final_steps.append(step)

    def run_final_steps(self) -> None:
        while self._final_steps:
            self._final_steps.pop(0)()


_context = WorkerContext()


def worker_context() -> WorkerContext:
    """Return the context of this process."""
    return _context


def enter_worker(context: WorkerContext) -> None:
    """Make this process the rank that the context belongs to."""
    global _context
    _context = context


def connect_store(prefix: str, address: tuple[str, int] | None = None, **options: Any) -> Any:
    """Return a client of the run's store, whatever rendezvous the program has chosen.

    It is the one at the address, by default that of the run's start, and has its own connection, a
    prefix of its keys, and options of ``torch.distributed.TCPStore``.
    """
    import torch.distributed as dist

    host, port = address or worker_context().rendezvous
    # Torch adds a new store to its table of Python objects without the interpreter's lock.
    with _connecting:
        client = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=False, wait_for_workers=False, **options
        )
        store = dist.PrefixStore(prefix, client)  # type: ignore[attr-defined]
        del client
        return store


_connecting = threading.Lock()
TAG_BYTES = 32


def sealed(key: str, data: bytes) -> bytes:
    """Return a value for a key of the store with a tag that only this run's ranks can make."""
    return _tag(key, data) + data


def unsealed(key: str, found: bytes) -> bytes:
    """Return a sealed value: anybody who reaches the store can write to it."""
    tag, data = found[:TAG_BYTES], found[TAG_BYTES:]
    if not hmac.compare_digest(tag, _tag(key, data)):
        raise DistributorError(
            f"The value of {key!r} is not what a rank has sent: another program writes to the "
            f"rendezvous store at {joined(*worker_context().rendezvous)}. Use a network that only "
            "the cluster can reach."
        )
    return data


def _tag(key: str, data: bytes) -> bytes:
    return hmac.digest(worker_context().secret, key.encode() + b"\n" + data, "sha256")


def device() -> torch.device:
    """Return this rank's GPU if the run uses GPUs, else the CPU; outside a run the current GPU."""
    import torch

    if not (worker_context().uses_gpus and torch.cuda.is_available()):
        return torch.device("cpu")
    if "LOCAL_RANK" not in os.environ:
        return torch.device("cuda", torch.cuda.current_device())
    # The ranks of a node see all of its GPUs: one for each, unless `env` sets
    # CUDA_VISIBLE_DEVICES to fewer, which they then share.
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def finish_gpu_work() -> None:
    """Wait for the kernels that this process has started on its GPU, if any."""
    # Otherwise, the error of one that fails after the program's last statement would be lost, or
    # would look like an error of what pickles the program's value.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def move(batch: Any, target: torch.device) -> Any:
    """Return a batch with its tensors on a device; pinned ones are copied asynchronously."""
    return _map_tensors(lambda tensor: tensor.to(target, non_blocking=True), batch)


def pin(batch: Any) -> Any:
    """Return a batch with its tensors in pinned memory."""
    return _map_tensors(lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory(), batch)


def _map_tensors(change: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    import torch

    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return type(batch)({key: _map_tensors(change, part) for key, part in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map_tensors(change, part) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_map_tensors(change, part) for part in batch)
    return batch
