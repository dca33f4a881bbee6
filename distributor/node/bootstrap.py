"""Turns a new interpreter into a rank, a supervisor or a zygote."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable

from distributor.node.process.specs import WorkerSpec


def main(role: str, argument: str, exit_handlers: list[Callable[[], object]]) -> None:
    """Run in a role; the handlers, to which a rank adds its own, are called at the very end.

    A zygote's supervisors fork ranks, in which this function continues as it does in a rank that
    has an interpreter of its own.
    """
    loaded = pickle.loads(base64.b64decode(argument))
    if role == "rank":
        worker_spec: WorkerSpec = loaded
    elif role == "zygote":
        from distributor.node.process import zygote

        worker_spec = zygote.serve(*loaded)
    else:
        from distributor.node.process import supervisor

        supervisor.serve_fresh(loaded)
    # Imported only here, so that a supervisor of fresh ranks stays small.
    from distributor.node.worker.main import main as run_worker

    run_worker(worker_spec, exit_handlers)
