"""How a new interpreter becomes a rank, a supervisor or a zygote."""

from __future__ import annotations

from collections.abc import Callable

from distributor.node.process.worker_spec import WorkerSpec


def main(role: str, argument: str, at_the_end: list[Callable[[], object]]) -> None:
    """Be a rank, at once or forked from what this process becomes."""
    if role == "rank":
        worker_spec = WorkerSpec.from_argument(argument)
    elif role == "zygote":
        from distributor.node.process import zygote

        worker_spec = zygote.serve(argument)
    else:
        from distributor.node.process import supervisor

        supervisor.serve_fresh(argument)
    # Not before: a supervisor of fresh ranks is to be small.
    from distributor.node.worker.main import main as run_worker

    run_worker(worker_spec, at_the_end)
