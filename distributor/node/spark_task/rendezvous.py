"""How nodes learn where rank 0's store listens, and check that they can reach it."""

from __future__ import annotations

import json
import queue
import socket
import time
from dataclasses import asdict
from typing import Any, Generic, NamedTuple, TypeVar

from distributor.core.addresses import host_name, joined
from distributor.core.versions import Software, check_alike
from distributor.errors import ExecutorNotReady, StartTimeout
from distributor.wire.messages import Rendezvous

REACH_SECONDS = 10.0
"""Seconds to connect to rank 0's store."""


T = TypeVar("T")


class HubAnswer(Generic[T]):
    """An answer of the hub that a node waits for.

    Parameters
    ----------
    otherwise : str
        What to report if it does not come in time.
    """

    def __init__(self, otherwise: str) -> None:
        self._otherwise = otherwise
        self._answers: queue.Queue[T | None] = queue.Queue()

    def answer(self, message: T) -> None:
        """Receive the driver's answer. From any thread."""
        self._answers.put(message)

    def give_up(self) -> None:
        """Stop waiting, because the link or the run has ended. From any thread."""
        self._answers.put(None)

    def wait(self, timeout: float) -> T | None:
        """Wait for the driver's answer; None if the link or the run has ended.

        Raises
        ------
        StartTimeout
            If there is no answer within `timeout` seconds.
        """
        try:
            return self._answers.get(timeout=timeout)
        except queue.Empty:
            raise StartTimeout(self._otherwise) from None


class SparkExchange(NamedTuple):
    """What all nodes learn from one another through Spark."""

    store: Rendezvous
    """Where rank 0's store listens."""
    some_have_link: bool
    """Whether any node has a link to the driver."""


def exchange_through_spark(
    context: Any, own: Rendezvous | None, software: Software, *, has_link: bool
) -> SparkExchange:
    """Exchange addresses and versions by ``allGather``, which takes Spark about a second.

    Parameters
    ----------
    context : BarrierTaskContext
        Spark's context of the task.
    own : Rendezvous or None
        Where the store listens, on the node that has rank 0.
    software : mapping of str to str
        This node's versions.
    has_link : bool
        Whether this node has a link to the driver.

    Raises
    ------
    ExecutorNotReady
        If the versions of the nodes differ.
    """
    report = {
        "store": asdict(own) if own else None,
        "software": dict(software),
        "linked": has_link,
    }
    reports = [json.loads(text) for text in context.allGather(json.dumps(report))]
    by_host = zip(hosts_of(context), reports, strict=True)
    check_alike({host: each["software"] for host, each in by_host})
    return SparkExchange(
        store=next(Rendezvous(**each["store"]) for each in reports if each["store"]),
        some_have_link=any(each["linked"] for each in reports),
    )


def hosts_of(context: Any) -> list[str]:
    """Return the hosts of a barrier stage's tasks, in the order of the tasks."""
    return [info.address.rsplit(":", 1)[0] for info in context.getTaskInfos()]


def check_reachable(store: Rendezvous) -> None:
    """Connect to rank 0's store, because torch would wait half an hour for one it cannot reach.

    Raises
    ------
    ExecutorNotReady
        If there is no connection within `REACH_SECONDS`.
    """
    try:
        socket.create_connection((store.host, store.port), REACH_SECONDS).close()
    except OSError as error:
        if isinstance(error, ConnectionRefusedError):
            # Rank 0 may have ended already. Its own node then reports why, which ends this task.
            time.sleep(REACH_SECONDS)
        raise ExecutorNotReady(
            f"The executor on {host_name()} cannot reach rank 0's at "
            f"{joined(store.host, store.port)} ({error}). Ranks communicate over TCP: allow "
            "connections between the hosts of the executors, in both directions. rank_ports limits "
            "the port of rank 0's store, and net.ipv4.ip_local_port_range of the hosts limits the "
            "ports of gloo and NCCL."
        ) from error
