"""What is examined: the ranks that a run would have, and the ports that they would use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distributor.core.addresses import checked_port, port_range, split_address
from distributor.launch.defaults import NOT_GIVEN, complete
from distributor.launch.setting_checks import check_count


@dataclass(frozen=True)
class Wanted:
    """What a run would need; checked on construction.

    Parameters
    ----------
    num_processes : int or None
        The number of ranks; None for one on each executor, or two on this machine.
    gpus : int
        The number of GPUs, one for each rank; 0 for ranks on CPUs.
    storage_path : str or None
        Storage that all hosts share.
    hub_address : str or None
        The address of the driver that executors connect to.
    hub_port : int
        Its port; 0 for any.
    rank_ports : str or None
        A range of ports for rank 0's store.

    Raises
    ------
    TypeError, ValueError
        If a value is invalid.
    """

    num_processes: int | None = None
    gpus: int = 0
    storage_path: str | None = None
    hub_address: str | None = None
    hub_port: int = NOT_GIVEN
    rank_ports: str | None = NOT_GIVEN

    def __post_init__(self) -> None:
        complete(self)
        if self.num_processes is not None:
            check_count("num_processes", self.num_processes)
        if self.gpus != 0:
            check_count("gpus", self.gpus)
        if self.gpus and self.num_processes not in (None, self.gpus):
            raise ValueError(
                f"Each rank has one GPU, but num_processes is {self.num_processes} and gpus is "
                f"{self.gpus}. Leave one of them out."
            )
        if self.hub_address is not None:
            split_address("hub_address", self.hub_address)
        checked_port("hub_port", self.hub_port)
        port_range("rank_ports", self.rank_ports)

    @property
    def ranks(self) -> int | None:
        """The number of ranks; None if any would do."""
        return self.gpus or self.num_processes

    @property
    def run_settings(self) -> dict[str, Any]:
        """The settings of `TorchDistributor` for a run on a cluster."""
        names = ("hub_address", "hub_port", "rank_ports")
        return {name: getattr(self, name) for name in names}
