"""The command that starts an interpreter with this one's modules at hand."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping

BOOT = """
import atexit, json, sys
at_the_end = []
atexit.register(lambda: [leave() for leave in at_the_end])
sys.path[:] = json.loads(sys.argv.pop())
from distributor.node import boot
boot.main(*sys.argv[1:], at_the_end)
"""
"""What the interpreter runs; its arguments are a role, that role's argument, and a ``sys.path``.

Exit handlers run last in, first out: registered before any import, ours comes after all others.
"""


def command(role: str, argument: str) -> list[str]:
    """Give the command line of an interpreter that has this process's modules at hand.

    Parameters
    ----------
    role : "rank", "keeper" or "zygote"
        What it is to be.
    argument : str
        What that role needs to know.
    """
    return [sys.executable, "-c", BOOT, role, argument, json.dumps(sys.path)]


def start_apart(
    role: str, argument: str, descriptor: int, environment: Mapping[str, str] | None = None
) -> int:
    """Start an interpreter in a session of its own, silent, and reaped when it ends.

    Parameters
    ----------
    role, argument : str
        As `command` has them.
    descriptor : int
        What it inherits.
    environment : mapping of str to str, optional
        Its environment; by default this process's.

    Returns
    -------
    int
        Its process id.
    """
    child = subprocess.Popen(
        command(role, argument),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[descriptor],
        start_new_session=True,
        env=environment,
    )
    threading.Thread(target=child.wait, name=f"{role}-reaper", daemon=True).start()
    return child.pid
