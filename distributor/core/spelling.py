"""How the API that the user has called names things, for messages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spelling:
    """The names that one API uses; the defaults are those of `TorchDistributor`.

    Parameters
    ----------
    api : str
        The class, decorator or command.
    num_processes : str
        The parameter for the number of ranks.
    run_here : str
        What to do for ranks on this machine instead of a cluster.
    """

    api: str = "TorchDistributor"
    num_processes: str = "num_processes"
    run_here: str = "pass local_mode=True"
