"""Starts the ranks of one node: their files, their control channels and their processes."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable
from typing import Any, BinaryIO

from distributor.core.node_settings import NodeSettings
from distributor.core.resources import local_folder
from distributor.node.agent.share import NodeShare
from distributor.node.agent.worker_env import rank_environment
from distributor.node.agent.worker_handle import WorkerHandle
from distributor.node.process.scratch import new_scratch_path
from distributor.node.process.spawner import Spawner, WorkerSpec
from distributor.serialization.oob_pickle import anonymous_file
from distributor.wire.messages import Source


class RankStarter:
    """Starts the ranks of one node.

    Parameters
    ----------
    node : NodeShare
        The node's share of the run.
    program : BinaryIO
        A file with the `Program` that each rank runs.
    spawner : Spawner
        Starts the processes.
    store_socket : socket or None
        The bound socket for the rendezvous store, on the node that has rank 0.
    data : BinaryIO or None
        A file with the node's part of the run's datasets.
    on_exit : callable
        Called once for each process that has ended, on any thread.
    """

    def __init__(
        self,
        node: NodeShare,
        program: BinaryIO,
        spawner: Spawner,
        store_socket: socket.socket | None,
        data: BinaryIO | None,
        on_exit: Callable[[], object],
    ) -> None:
        self._node = node
        self._program = program
        self._spawner = spawner
        self._store_socket = store_socket
        self._data = data
        self._on_exit = on_exit

    def start(self, local_rank: int) -> WorkerHandle:
        """Start the node's rank number `local_rank`."""
        with contextlib.ExitStack() as opened:
            worker = self._start(local_rank, opened.enter_context)
            opened.pop_all()  # the worker closes them
        return worker

    def _start(self, local_rank: int, opened: Callable[[Any], Any]) -> WorkerHandle:
        origin = self._node.origin(local_rank)
        ours, theirs = map(opened, socket.socketpair())
        ours.sendall(self._node.secret)
        outcome, answers, progress = (opened(anonymous_file()) for _ in range(3))
        folder = local_folder()
        stdout, stderr = (opened(tempfile.TemporaryFile(dir=folder)) for _ in range(2))
        is_first = origin.rank == 0
        scratch = new_scratch_path()
        worker_spec = WorkerSpec(
            origin=origin,
            parent=os.getpid(),
            control=theirs.fileno(),
            program=self._program.fileno(),
            outcome=outcome.fileno(),
            stacks=answers.fileno(),
            progress=progress.fileno(),
            listener=self._store_socket.fileno() if self._store_socket and is_first else None,
            data=self._data.fileno() if self._data else None,
            scratch=scratch,
            keep_value=self._node.keep_all or is_first,
            uses_gpus=self._node.uses_gpus,
            modules=self._node.modules,
            program_name=self._node.program_name,
            run_id=self._node.run_id,
            settings=NodeSettings.of(self._node),
        )
        environment = rank_environment(self._node, local_rank, os.environ)
        with theirs:
            process = self._spawner.start(worker_spec, environment, stdout, stderr, self._on_exit)
        output_files: dict[Source, BinaryIO] = {
            "stdout": stdout,
            "stderr": stderr,
            "progress": progress,
        }
        return WorkerHandle(origin, process, ours, outcome, answers, output_files, scratch)
