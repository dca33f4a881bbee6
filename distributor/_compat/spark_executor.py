"""What a Python worker learns of its executor from the command line of the executor's JVM."""

from __future__ import annotations

import os
from pathlib import Path

HOST, ID = "--hostname", "--executor-id"


def executor_of(pid: int) -> tuple[str, str] | None:
    """Return the host and the id of the executor above a process, by the names that Spark uses.

    None if it has none, as with a local master, or if the system has no /proc.
    """
    while pid > 1:
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return None
        if HOST.encode() in arguments and ID.encode() in arguments:
            host, number = (_value(arguments, name) for name in (HOST, ID))
            return host, number
        pid = int(fields[1])
    return None


def _value(arguments: list[bytes], name: str) -> str:
    return os.fsdecode(arguments[arguments.index(name.encode()) + 1])
