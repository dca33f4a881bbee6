"""The peers by name: this project, other launchers, and lower bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from benchmarks import floors, launchers, spark
from benchmarks.launchers import Run
from benchmarks.packages import version_of
from distributor.core.versions import DISTRIBUTION


@dataclass(frozen=True)
class Peer:
    """A launcher or a lower bound, which runs a function on ranks.

    Parameters
    ----------
    name, title : str
        Name on the command line, and title in tables.
    open : callable
        Sets it up: ``open(place, ranks)`` is a context manager that yields ``run``.
    package : str, optional
        Distribution whose version is recorded.
    slow : bool
        Whether only the main case is measured, because a run takes long.
    note : str
        Remark for readers of its figures.
    """

    name: str
    title: str
    open: Callable[..., AbstractContextManager[Run]]
    package: str | None = None
    slow: bool = False
    note: str = ""

    @property
    def family(self) -> str:
        """Name of all variants of one peer, for ``--peers``."""
        return self.name.partition("_")[0]

    @property
    def missing(self) -> str:
        """Why it cannot run here; empty if it can."""
        if self.package and version_of(self.package) is None:
            return f"{self.package} is not installed"
        return ""


PEERS = {
    peer.name: peer
    for peer in (
        Peer("ours", "distributor", launchers.ours, DISTRIBUTION),
        Peer(
            "ours_ahead",
            "distributor, warm_up 2 s before its run",
            launchers.ours_ahead,
            DISTRIBUTION,
        ),
        Peer("ours_cold", "distributor, warm=False", launchers.ours_cold, DISTRIBUTION),
        Peer("ours_ordinary", "distributor, barrier=False", launchers.ours_ordinary, DISTRIBUTION),
        Peer(
            "pyspark",
            "PySpark's TorchDistributor",
            launchers.pyspark,
            "pyspark",
            note="creating its Spark session is not counted",
        ),
        Peer("torchrun", "torchrun", launchers.torchrun, "torch"),
        Peer(
            "ray",
            "Ray Train",
            launchers.ray,
            "ray",
            slow=True,
            note="ray.init is not counted; Ray initializes the process group itself",
        ),
        Peer("floor_processes", "floor: bare processes", floors.processes),
        Peer(
            "floor_forks",
            "floor: bare forks",
            floors.forks,
            note="the driver's own import of torch is not counted",
        ),
        Peer("floor_copy", "floor: one copy in memory", floors.copies),
        Peer("floor_sockets", "floor: bare sockets", floors.sockets),
        Peer("floor_stage", "floor: empty barrier stage", spark.stage, "pyspark"),
    )
}


def chosen(names: Sequence[str], families: Sequence[str]) -> list[Peer]:
    """Return the named peers of the given families; without families, all of them."""
    peers = [PEERS[name] for name in names]
    return [peer for peer in peers if not families or peer.family in families]
