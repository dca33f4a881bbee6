"""Environment variables that a program sets before it imports torch.

In a warm rank torch has been imported before the program starts. What torch can still apply is
applied when the program imports it. A rank with preloaded modules is left as it is: these may have
imported torch for the program. So is one whose function does not mention the environment, because
to hide torch takes milliseconds.
"""

from __future__ import annotations

import os

from distributor._compat import torch as private
from distributor.rank.import_hooks import at_next_import

LOGS = ("TORCH_LOGS", "TORCH_LOGS_FORMAT", "TORCH_LOGS_OUT")
DEBUG_LEVEL = "TORCH_DISTRIBUTED_DEBUG"


def read_variables_at_import() -> None:
    """Apply the variables that the program changes from now on when it imports torch."""
    before = dict(os.environ)
    at_next_import("torch", lambda: _apply_changes(before))


def _apply_changes(before: dict[str, str]) -> None:
    changed = {name for name, _ in before.items() ^ os.environ.items()}
    if any(name.endswith("_NUM_THREADS") for name in changed):
        # Imported only here: in a fresh rank, threadpoolctl would set variables before the program.
        from distributor.node.process.fork_reset import set_thread_counts

        set_thread_counts()
    if not changed.isdisjoint(LOGS):
        private.read_log_variables()
    if DEBUG_LEVEL in changed:
        private.read_debug_level()
