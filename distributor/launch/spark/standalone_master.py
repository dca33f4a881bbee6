"""What the master of a standalone cluster reports on its workers and applications."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MASTER = "spark://"
UI_PORT = 8080
"""The port of the master's web page, unless ``spark.master.ui.port`` sets another."""
ANSWER_SECONDS = 2.0


@dataclass(frozen=True)
class Capacity:
    """Cores, memory (MiB) and GPUs: what a worker has, has free, or an executor asks for."""

    cores: int
    memory: int
    gpus: int

    def holds(self, other: Capacity) -> bool:
        """Return whether `other` fits into this."""
        return self.cores >= other.cores and self.memory >= other.memory and self.gpus >= other.gpus

    def __str__(self) -> str:
        gpus = counted(self.gpus, "GPU") if self.gpus else "no GPU"
        return f"{counted(self.cores, 'core')}, {in_mebibytes(self.memory)} of memory and {gpus}"


@dataclass(frozen=True)
class Master:
    """What a master says of its cluster.

    Parameters
    ----------
    workers : tuple of Capacity
        What each worker that is alive has in all.
    free : tuple of Capacity
        What each of them has free.
    others : tuple of str
        The other applications that hold cores, by name and id.
    """

    workers: tuple[Capacity, ...]
    free: tuple[Capacity, ...]
    others: tuple[str, ...]


def ask_master(url: str, ui_port: int, application: str | None) -> Master | None:
    """Ask a standalone master for its workers and applications, over its web page's JSON.

    Parameters
    ----------
    url : str
        The master's URL, ``spark://host:port``; of several, the first that answers is asked.
    ui_port : int
        The port of its web page.
    application : str or None
        The id of the application that asks.

    Returns
    -------
    Master or None
        None if there is no answer: the page may be elsewhere, behind a firewall or protected.
    """
    for address in url.removeprefix(MASTER).split(","):
        host = address.rpartition(":")[0]
        with contextlib.suppress(Exception):
            said = _json_of(f"http://{host}:{ui_port}/json/")
            if said["status"] == "ALIVE" and said["url"] in (f"{MASTER}{address}", url):
                return _master_in(said, application)
    return None


def counted(count: int, noun: str) -> str:
    """Write a number of things: ``1 core``, ``2 cores``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def in_mebibytes(count: int) -> str:
    """Write an amount of memory as Spark's settings do: ``512m``, ``64g``."""
    return f"{count // 1024}g" if count and count % 1024 == 0 else f"{count}m"


def _json_of(address: str) -> Any:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(address, timeout=ANSWER_SECONDS) as answer:
        return json.load(answer)


def _master_in(said: Mapping[str, Any], application: str | None) -> Master:
    alive = [worker for worker in said["workers"] if worker["state"] == "ALIVE"]
    return Master(
        workers=tuple(_capacity(worker, "") for worker in alive),
        free=tuple(_capacity(worker, "free") for worker in alive),
        others=tuple(
            f"'{app['name']}' ({app['id']}, {counted(app['cores'], 'core')})"
            for app in said["activeapps"]
            if app["id"] != application and app["cores"]
        ),
    )


def _capacity(worker: Mapping[str, Any], kind: str) -> Capacity:
    gpus = worker.get(f"resources{kind}", {}).get("gpu", {})
    addresses = gpus.get("addresses", ()) if isinstance(gpus, Mapping) else gpus
    return Capacity(worker[f"cores{kind}"], worker[f"memory{kind}"], len(addresses))
