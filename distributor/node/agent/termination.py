"""The end of workers: their release after the work, a limit for lingering, and a forced stop."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from distributor.core.text import Redaction
from distributor.node.agent.output import Sink
from distributor.node.agent.worker_handle import WorkerHandle
from distributor.node.worker.stacks import append_stacks, dump_stacks
from distributor.serialization.outcome import Failure, Value, death


def failure_at_exit(worker: WorkerHandle, returncode: int, redaction: Redaction) -> Failure:
    """Return the failure of a rank whose process ended without reporting an outcome."""
    tail = redaction.of_text(worker.tail())
    if returncode < 0:
        return death(worker.origin, signum=-returncode, tail=tail)
    return death(worker.origin, exit_code=returncode, tail=tail)


def redact(failure: Failure, redaction: Redaction) -> Failure:
    """Return a copy of the failure without secrets."""
    return replace(
        failure,
        summary=redaction.of_text(failure.summary),
        text=redaction.of_text(failure.text),
    )


TERMINATION_GRACE_SECONDS = 5.0
"""Seconds between SIGTERM and SIGKILL."""
LINGERING_WARNING_SECONDS, LINGERING_KILL_SECONDS = 30.0, 600.0
"""Seconds after its work at which a rank that has not ended is reported, and is killed."""
KILL_SECONDS = 30.0
"""Seconds from SIGKILL after which a process is left alone, because it hangs in the kernel."""


def all_have_values(workers: Sequence[WorkerHandle]) -> bool:
    """Return whether all workers have ended with a value; rank 0 may still run."""
    return all(
        isinstance(worker.outcome, Value) and (worker.origin.rank == 0 or not worker.running)
        for worker in workers
    )


def release_finished(workers: Sequence[WorkerHandle], run_is_done: bool) -> None:
    """Let workers end whose outcome is known."""
    for worker in workers:
        serves_store = worker.origin.rank == 0 and isinstance(worker.outcome, Value)
        if worker.outcome is not None and (run_is_done or not serves_store):
            worker.release()


def limit_lingering(workers: Sequence[WorkerHandle], sink: Sink) -> None:
    """Report workers that have done their work and do not end; after a while, kill them."""
    now = time.monotonic()
    late: dict[int, WorkerHandle] = {}
    for worker in workers:
        if worker.running and now > worker.released_at + LINGERING_KILL_SECONDS:
            worker.process.kill()
        elif (
            worker.running
            and not worker.has_lingering_warning
            and now > worker.released_at + LINGERING_WARNING_SECONDS
        ):
            worker.has_lingering_warning = True
            late[worker.origin.rank] = worker
    stacks = dump_stacks(late) if late else {}  # of all at once: each may take seconds
    for rank, worker in late.items():
        warning = (
            f"distributor: {worker.origin} has done its work, but its process is still "
            "running, because of a non-daemon thread, an exit handler or a finalizer. It is "
            f"killed {LINGERING_KILL_SECONDS:.0f} s after the end of its work."
        )
        text = append_stacks(warning, {rank: stacks[rank]} if rank in stacks else {})
        sink.write(rank, "stderr", f"{text}\n".encode())


def terminate(workers: Sequence[WorkerHandle], wait: Callable[[], bool]) -> None:
    """Stop the workers that still run: SIGTERM to their process groups, a grace period, SIGKILL.

    A worker whose outcome is known is ending: it has the grace period for its exit handlers. The
    grace period also ends once `wait`, which is called meanwhile, returns False.
    """
    for worker in workers:
        if worker.outcome is None:
            worker.process.terminate()
            if worker.ignores_sigterm:
                worker.process.kill()
        else:
            worker.release()
    deadline = time.monotonic() + TERMINATION_GRACE_SECONDS
    try:
        while any(worker.running for worker in workers) and time.monotonic() < deadline:
            if not wait():
                break
    finally:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            if not worker.process.join(KILL_SECONDS):
                print(f"distributor: {worker.origin} cannot be killed.", file=sys.stderr)
