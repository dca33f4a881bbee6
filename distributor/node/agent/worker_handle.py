"""The agent's handle of a worker: its process, its files and its control channel."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import BinaryIO

from distributor.node.process.scratch import remove_scratch
from distributor.node.process.spawner import Process
from distributor.rank import messages
from distributor.serialization.outcome import Origin, Outcome, Value
from distributor.wire.messages import Source, Stream

STANDARD_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")
TAIL_BYTES, TAIL_LINES = 8192, 40


@dataclass(eq=False)
class WorkerHandle:
    """A rank's process, and the anonymous files that it shares with its agent.

    The files have no name, so that no killed process leaves one behind.

    Attributes
    ----------
    origin : Origin
        Which rank it is, and on which host.
    process : Process
        Its process.
    control : socket
        The agent's end of its control channel.
    outcome_file, answers : BinaryIO
        The files with its outcome, and with the stacks that it was asked for.
    output_files : dict of str to BinaryIO
        The files into which it writes what it prints and reports.
    scratch : str
        Its scratch folder, which the agent removes.
    relayed : Counter
        How many bytes of each of the output files the sink has received.
    outcome : Value, Failure or None
        Its outcome, as soon as that is known.
    ignores_sigterm : bool
        Whether SIGTERM alone does not end it, because it subscribes to preemption notices.
    released_at : float
        When, by ``time.monotonic``, it was allowed to end; infinite before that.
    has_lingering_warning : bool
        Whether the user was warned that it does not end.
    """

    origin: Origin
    process: Process
    control: socket.socket
    outcome_file: BinaryIO
    answers: BinaryIO
    output_files: dict[Source, BinaryIO]
    scratch: str
    relayed: Counter[Source] = field(default_factory=Counter)
    outcome: Outcome | None = None
    ignores_sigterm: bool = False
    released_at: float = math.inf
    has_lingering_warning: bool = False

    @property
    def running(self) -> bool:
        return self.process.running

    @property
    def working(self) -> bool:
        """Whether the process runs and has no outcome yet."""
        return self.running and self.outcome is None

    @property
    def pid(self) -> int:
        return self.process.pid

    def release(self) -> None:
        """Let the worker end, because no other rank needs it any longer."""
        if self.released_at == math.inf:
            self.released_at = time.monotonic()
            self.send(messages.RELEASE)

    def send(self, message: bytes) -> None:
        """Send a message over the control channel, if the worker can receive it."""
        with contextlib.suppress(OSError):  # it has ended, or is stopped and its buffer is full
            self.control.send(message, socket.MSG_DONTWAIT)

    def tail(self) -> str:
        """Return the last lines that the worker printed."""
        ends = [self._end_of(self.output_files[stream]) for stream in STANDARD_STREAMS]
        lines = b"".join(ends).decode(errors="backslashreplace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    def close(self, keep_value: bool) -> None:
        """Close the files and the control channel."""
        remove_scratch(self.scratch)
        self.control.close()
        for file in (self.answers, *self.output_files.values()):
            file.close()
        if not (keep_value and isinstance(self.outcome, Value)):
            self.outcome_file.close()

    @staticmethod
    def _end_of(file: BinaryIO) -> bytes:
        size = os.fstat(file.fileno()).st_size
        return os.pread(file.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES))
