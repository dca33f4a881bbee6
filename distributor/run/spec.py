"""What a user wants of a run."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from distributor.run.settings import Settings
from distributor.serialization.program import Program


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What a user wants of a run.

    Parameters
    ----------
    program : Program
        What each rank runs.
    num_processes : int
        The maximum number of ranks.
    min_processes : int
        The minimum, if there is no room for more.
    settings : Settings
        The user's settings.
    env : mapping of str to str
        Environment variables of every rank: the user's, and the run's own.
    keep_all : bool
        Whether the values of all ranks are returned, and not only rank 0's.
    run_id : str
        The run's id.
    """

    program: Program
    num_processes: int
    min_processes: int
    settings: Settings
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    keep_all: bool = False
    run_id: str = field(default_factory=lambda: new_run_id())

    @property
    def logs(self) -> Path | None:
        """The folder of the run's output, if it is stored."""
        log_dir = self.settings.log_dir
        return Path(log_dir) / self.run_id if log_dir else None


def new_run_id() -> str:
    """Return a unique run id."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
