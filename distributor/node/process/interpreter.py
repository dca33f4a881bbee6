"""The interpreter that ranks run with, and how it is started."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from distributor.core.module_search import lasting_path

BOOT = """
import atexit, json, sys
exit_handlers = []
atexit.register(lambda: [handler() for handler in exit_handlers])
sys.path[:] = json.loads(sys.argv.pop())
for name in [name for name in sys.modules if name.partition(".")[0] == "distributor"]:
    del sys.modules[name]
from distributor.node import bootstrap
bootstrap.main(*sys.argv[1:], exit_handlers)
"""
"""The program that a new interpreter runs; its arguments are a role, the role's argument, and a
``sys.path``.

If the interpreter's start (a ``sitecustomize``) has imported this package, that may be another
copy, so it is dropped. Exit handlers run in reverse order of registration: ours is registered
before any import, and so runs after all others.
"""


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """The interpreter of ranks and of the processes that start them.

    Parameters
    ----------
    executable : str
        The interpreter's path.
    path : tuple of str
        Its ``sys.path``.
    variables : mapping of str to str
        Environment variables that it needs in addition to those of its parent.
    """

    executable: str
    path: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def current(cls) -> Interpreter:
        """Return the interpreter of this process, with the modules that can be imported here."""
        return cls(executable=sys.executable, path=tuple(lasting_path()))

    def command(self, role: str, argument: str) -> list[str]:
        """Return the command line that starts the interpreter.

        Parameters
        ----------
        role : "rank", "supervisor" or "zygote"
            What the new process is to be.
        argument : str
            What that role needs to know.
        """
        return [self.executable, "-c", BOOT, role, argument, json.dumps(self.path)]

    def start_detached(
        self, role: str, argument: str, descriptor: int, environment: Mapping[str, str]
    ) -> int:
        """Start the interpreter in a session of its own, without output; reap it when it ends.

        Parameters
        ----------
        role, argument : str
            As for `command`.
        descriptor : int
            A file descriptor that the process inherits.
        environment : mapping of str to str
            The whole environment of the process.

        Returns
        -------
        int
            The process id.
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
