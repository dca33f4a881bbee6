"""The launcher that runs all ranks on this machine: one node, on a thread of this process."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

from distributor.control.run import Attempt, Handle, Launcher, NodeEnded, Run, share_of
from distributor.core.addresses import LOOPBACK
from distributor.core.text import counted
from distributor.core.versions import pickling_software
from distributor.node.agent.node_warnings import memory_warnings, node_warnings
from distributor.node.agent.worker_env import common_environment
from distributor.node.node import Node, NodeStopped, Provisions
from distributor.node.process import zygote
from distributor.node.process.supervisor import Interpreter, is_supported
from distributor.node.process.zygote import ZygoteSpec
from distributor.programs import prepared_here
from distributor.rank.messages import SECRET_BYTES
from distributor.screen.messages import warn_if_source_changed
from distributor.serialization.program import in_file
from distributor.spark.user_modules import folders_of, located_modules
from distributor.wire.messages import NodeWarning, Stop
from distributor.wire.node_link import NodeLink, QueueLinks

NODE = 0
"""The number of the only node of a local run."""


@dataclass(frozen=True)
class LocalLauncher(Launcher):
    """Runs all ranks of an attempt on this machine.

    Parameters
    ----------
    gpus : tuple of str or None
        Entries for ``CUDA_VISIBLE_DEVICES``, one for each rank. If ranks use no GPUs, it is empty,
        which hides all GPUs, or None, which leaves the variable as it is.
    """

    gpus: tuple[str, ...] | None

    shares_disk = True

    def training(self, num_ranks: int) -> str:
        return f"local training with {counted(num_ranks, 'process', 'processes')}"

    def room(self) -> int:
        if self.gpus:
            return len(self.gpus)
        return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1

    def capacity(self, run: Run, silent: Collection[str]) -> int:
        """Return the run's size, which the plan has adapted to this machine."""
        return run.spec.num_processes

    @contextlib.contextmanager
    def start(self, attempt: Attempt, deadline: float) -> Iterator[Handle]:
        attempt.announce()
        warn_if_source_changed()
        spec, settings, datasets = attempt.spec, attempt.settings, attempt.run.datasets
        located = located_modules(spec.program, settings.py_modules)
        links = QueueLinks()
        with (
            prepared_here(settings.environment, spec.env, deadline) as prepared,
            in_file(replace(spec.program, located=located)) as program,
        ):
            provisions = Provisions(
                prepared.interpreter if prepared else Interpreter.current(),
                prepared.software if prepared else pickling_software(),
                program,
                datasets.file() if datasets else None,
                (*node_warnings(), *_memory_warnings(attempt)),
            )
            node = self._node(attempt, deadline)
            link = links.connect(NODE, node.receive)
            thread = threading.Thread(
                target=_run_node, args=(node, link, provisions, links), name="node", daemon=True
            )
            try:
                thread.start()
                yield Handle(
                    links=links,
                    num_nodes=1,
                    cancel=lambda: _end(thread, node, links),
                )
            finally:
                _end(thread, node, links)

    def describe(self) -> dict[str, object]:
        return {"mode": "local", "nodes": 1, "gpus": len(self.gpus or ())}

    def _node(self, attempt: Attempt, deadline: float) -> Node:
        share = share_of(attempt, 1, secrets.token_bytes(SECRET_BYTES))
        modules = os.pathsep.join(folders_of(attempt.settings.py_modules))
        left = max(0.0, deadline - time.monotonic())
        return Node(
            replace(
                share,
                settings=SimpleNamespace(**{**vars(share.settings), "start_timeout": left}),
                host=socket.gethostname(),
                address=LOOPBACK,
                gpus=self.gpus,
                modules=modules,
            )
        )


def _end(thread: threading.Thread, node: Node, links: QueueLinks) -> None:
    """Stop the ranks, if they run, and wait until they have ended."""
    links.lift_limit()  # nothing is taken from the queue meanwhile
    if thread.is_alive():
        links.broadcast(Stop("the run has ended"))
        node.stop_ranks()  # an interrupt may have kept the node from doing so
    if thread.ident is None:
        return  # it was not started
    try:
        thread.join()
    except BaseException:  # another Ctrl-C
        node.kill_ranks()
        thread.join()
        raise


def _run_node(node: Node, link: NodeLink, provisions: Provisions, links: QueueLinks) -> None:
    try:
        with contextlib.suppress(NodeStopped), node:
            node.open(link)
            node.run(contextlib.nullcontext(provisions), os.getpid())
    finally:
        links.post(NodeEnded(NODE))


def _memory_warnings(attempt: Attempt) -> Iterator[NodeWarning]:
    return memory_warnings(
        attempt.num_ranks,
        1,
        warm=attempt.settings.warm and is_supported(),
        is_warm=lambda: zygote.is_warm(os.getpid()),
    )


def prepare_zygote(num_ranks: int, env: Mapping[str, str], preload: Sequence[str]) -> None:
    """Start this process's zygote in the background, for ranks with these variables."""
    zygote.prepare(
        ZygoteSpec(
            owner=os.getpid(),
            environment=common_environment(num_ranks, env, os.environ),
            preload=tuple(preload),
        )
    )


def cool_down() -> None:
    """Shut down this process's zygote, if it has one. Active runs are unaffected.

    The zygote is the warm process from which the ranks of local runs are forked. It also ends with
    this process, or after half an hour without a run. The next run starts a new one.

    Examples
    --------
    >>> distributor.cool_down()
    """
    zygote.shut_down(os.getpid())
