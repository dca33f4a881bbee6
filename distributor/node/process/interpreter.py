"""The interpreter that ranks run with, and how it is started."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

BOOT = """
import atexit, json, sys
at_the_end = []
atexit.register(lambda: [leave() for leave in at_the_end])
sys.path[:] = json.loads(sys.argv.pop())
for name in [name for name in sys.modules if name.partition(".")[0] == "distributor"]:
    del sys.modules[name]
from distributor.node import bootstrap
bootstrap.main(*sys.argv[1:], at_the_end)
"""
"""What the interpreter runs; its arguments are a role, that role's argument, and a ``sys.path``.

If the start of the interpreter (a ``sitecustomize``) has imported this package already, that may
be another copy. Exit handlers run last in, first out: registered before any import, ours comes
after all others.
"""


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """What ranks, and the processes that start them, run with.

    Parameters
    ----------
    executable : str
        Its path.
    path : tuple of str
        The ``sys.path`` of what it runs.
    variables : mapping of str to str
        What it needs in its environment beyond what is there already.
    """

    executable: str
    path: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def current(cls) -> Interpreter:
        """Give this process's own, with its modules at hand."""
        return cls(executable=sys.executable, path=tuple(sys.path))

    def command(self, role: str, argument: str) -> list[str]:
        """Give the command line that starts it.

        Parameters
        ----------
        role : "rank", "supervisor" or "zygote"
            What it is to be.
        argument : str
            What that role needs to know.
        """
        return [self.executable, "-c", BOOT, role, argument, json.dumps(self.path)]

    def start_detached(
        self, role: str, argument: str, descriptor: int, environment: Mapping[str, str]
    ) -> int:
        """Start it in a session of its own, silent, and reaped when it ends.

        Parameters
        ----------
        role, argument : str
            As `command` has them.
        descriptor : int
            What it inherits.
        environment : mapping of str to str
            Its whole environment.

        Returns
        -------
        int
            Its process id.
        """
        child = subprocess.Popen(
            self.command(role, argument),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[descriptor],
            start_new_session=True,
            env=environment,
        )
        threading.Thread(target=child.wait, name=f"{role}-reaper", daemon=True).start()
        return child.pid
