"""The agent's handle of a rank: its process, files and control channel."""

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
from distributor.node.worker import control_channel
from distributor.serialization.outcome import Origin, Outcome, Value
from distributor.wire.messages import Source, Stream

PRINTED: tuple[Stream, ...] = ("stdout", "stderr")
TAIL_BYTES, TAIL_LINES = 8192, 40


@dataclass(eq=False)
class Rank:
    """A rank's process and the anonymous files that tie it to its agent.

    They have no name, so that no kill of any process leaves one behind.
    """

    origin: Origin
    process: Process
    control: socket.socket
    outcome_file: BinaryIO
    answers: BinaryIO
    told: dict[Source, BinaryIO]
    scratch: str
    passed_on: Counter[Source] = field(default_factory=Counter)
    outcome: Outcome | None = None
    ignores_sigterm: bool = False
    leaves_since: float = math.inf
    told_of: bool = False

    @property
    def running(self) -> bool:
        return self.process.running

    @property
    def pid(self) -> int:
        return self.process.pid

    def let_leave(self) -> None:
        """Let the rank end: nobody needs it any longer."""
        if self.leaves_since == math.inf:
            self.leaves_since = time.monotonic()
            self.tell(control_channel.RELEASE)

    def tell(self, what: bytes) -> None:
        with contextlib.suppress(OSError):  # it has left already, or has been stopped and is deaf
            self.control.send(what, socket.MSG_DONTWAIT)

    def tail(self) -> str:
        """Give the last lines that the rank printed."""
        ends = [self._end_of(self.told[stream]) for stream in PRINTED]
        lines = b"".join(ends).decode(errors="backslashreplace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    def close(self, keep_value: bool) -> None:
        remove_scratch(self.scratch)
        self.control.close()
        for file in (self.answers, *self.told.values()):
            file.close()
        if not (keep_value and isinstance(self.outcome, Value)):
            self.outcome_file.close()

    @staticmethod
    def _end_of(file: BinaryIO) -> bytes:
        size = os.fstat(file.fileno()).st_size
        return os.pread(file.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES))
