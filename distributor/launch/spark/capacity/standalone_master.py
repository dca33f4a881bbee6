"""What the master of a standalone cluster reports about its workers and applications."""

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
"""Seconds for the master to answer."""


@dataclass(frozen=True)
class Capacity:
    """Cores, memory (MiB) and GPUs of a worker, or those that an executor asks for."""

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
    """What a master reports about its cluster.

    Parameters
    ----------
    workers : tuple of Capacity
        The capacity of each worker that is alive.
    free : tuple of Capacity
        The free capacity of each of these workers.
    others : tuple of str
        The other applications that hold cores, with name and id.
    own : int
        The cores that executors of this application hold.
    """

    workers: tuple[Capacity, ...]
    free: tuple[Capacity, ...]
    others: tuple[str, ...]
    own: int


def ask_master(url: str, ui_port: int, application: str | None) -> Master | None:
    """Ask a standalone master for its workers and applications, over its web page's JSON.

    Parameters
    ----------
    url : str
        The master's URL, ``spark://host:port``. If it names several masters, the first one that
        answers is asked.
    ui_port : int
        The port of the master's web page.
    application : str or None
        The id of this application.

    Returns
    -------
    Master or None
        None if there is no answer: the page may have another address, a firewall or a password.
    """
    for address in url.removeprefix(MASTER).split(","):
        host = address.rpartition(":")[0]
        with contextlib.suppress(Exception):
            report = _json_of(f"http://{host}:{ui_port}/json/")
            if report["status"] == "ALIVE" and report["url"] in (f"{MASTER}{address}", url):
                return _master_in(report, application)
    return None


def counted(count: int, noun: str) -> str:
    """Return a number and its noun, such as ``1 core`` or ``2 cores``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def in_mebibytes(count: int) -> str:
    """Return an amount of memory (MiB) as Spark writes it, such as ``512m`` or ``64g``."""
    return f"{count // 1024}g" if count and count % 1024 == 0 else f"{count}m"


def _json_of(address: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(address, timeout=ANSWER_SECONDS) as answer:
        return json.load(answer)


def _master_in(report: Mapping[str, Any], application: str | None) -> Master:
    alive = [worker for worker in report["workers"] if worker["state"] == "ALIVE"]
    return Master(
        workers=tuple(_capacity(worker, "") for worker in alive),
        free=tuple(_capacity(worker, "free") for worker in alive),
        others=tuple(
            f"'{app['name']}' ({app['id']}, {counted(app['cores'], 'core')})"
            for app in report["activeapps"]
            if app["id"] != application and app["cores"]
        ),
        own=sum(app["cores"] for app in report["activeapps"] if app["id"] == application),
    )


def _capacity(worker: Mapping[str, Any], kind: str) -> Capacity:
    gpus = worker.get(f"resources{kind}", {}).get("gpu", {})
    addresses = gpus.get("addresses", ()) if isinstance(gpus, Mapping) else gpus
    return Capacity(worker[f"cores{kind}"], worker[f"memory{kind}"], len(addresses))
