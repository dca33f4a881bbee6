"""Where the hub listens, and the address that the nodes connect to."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distributor.core.addresses import LOOPBACK, bare, joined, split_address
from distributor.node.agent.network import source_address
from distributor.screen.messages import warn
from distributor.spark.session import Session
from distributor.wire.hub import Hub


@dataclass(frozen=True)
class HubAddress:
    """Where the hub listens, and the address that the nodes connect to.

    Parameters
    ----------
    bound, advertised : str
        The address of this process that is bound, and the one that the nodes connect to.
    port : int
        The port; 0 for any free one.
    chosen_by : str
        The setting by which the user has chosen it; empty if there is none.
    """

    bound: str
    advertised: str
    port: int = 0
    chosen_by: str = ""


def choose_hub_address(session: Session, wanted: str | None, port: int = 0) -> HubAddress:
    """Choose where the hub listens.

    By default the hub listens at the address of Spark's driver alone. A Connect client runs on
    another host, so it uses the address from which it reaches the driver.
    """
    driver = bare(session.conf("spark.driver.host") or LOOPBACK)
    bound = bare(session.conf("spark.driver.bindAddress") or driver)
    if wanted is not None:
        host, wanted_port = split_address("hub_address", wanted)
        bound = bound if host == driver else host
        return HubAddress(bound, host, wanted_port or port, "hub_address")
    if session.is_connect:
        try:
            bound = driver = source_address(driver)
        except OSError:
            bound = driver = LOOPBACK  # nodes on other hosts then have no link
    return HubAddress(bound, driver, port, "hub_port" if port else "")


class NodeHub(Hub):
    """A hub, and the address and port that the nodes connect to."""

    def __init__(self, address: HubAddress, secret: bytes) -> None:
        super().__init__(address.bound, secret, port=address.port)
        self.address = address.advertised, self.port


def open_hub(address: HubAddress, secret: bytes, *, is_required: bool = False) -> NodeHub:
    """Open the hub.

    If the user has not chosen the address and it cannot be bound, the run goes on without links,
    unless they are required: the hub then listens at the loopback address, and the user is warned.
    """
    try:
        return NodeHub(address, secret)
    except OSError as error:
        where = joined(address.bound, address.port or "(any port)")
        if address.chosen_by:
            raise OSError(
                f"{address.chosen_by} cannot be bound at {where}: {error}. Name an address of "
                "this machine that the executors can reach, and a port that is free (0 takes any)."
            ) from error
        if is_required:
            raise OSError(
                f"{where} of this process cannot be bound: {error}. Without a barrier stage, the "
                "tasks of a run connect to it: set hub_address to an address of this machine that "
                "the executors can reach."
            ) from error
        warn(f"No hub at {where}: {error}. Ranks' output will not be shown here.")
        return NodeHub(replace(address, bound=LOOPBACK, port=0), secret)
