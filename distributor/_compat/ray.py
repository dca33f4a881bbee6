"""What this package uses of Ray that is not documented. Ray is not imported here."""

from __future__ import annotations

import json
import sys

# The file in a node's temporary folder that ``ray start`` writes once the node has started. It has
# the cluster's address.
ADDRESS_FILE = "ray_current_cluster"

# The longest path of a Unix socket that Ray creates in its temporary folder.
LONGEST_SOCKET = "session_2000-01-01_00-00-00_000000_0000000/sockets/plasma_store.1"

# Environment variables of ``ray start``.
VARIABLES = {
    # A node that receives SIGTERM would wait this many seconds for its work to end.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}

_COMMAND = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from ray.scripts.scripts import main
main()
"""


def ray_command(*arguments: str) -> list[str]:
    """Return the ``ray`` command in this process's interpreter, with this process's modules."""
    # The script of that name may be missing, and python -m would search the working folder first.
    return [sys.executable, "-c", _COMMAND, json.dumps(sys.path), *arguments]
