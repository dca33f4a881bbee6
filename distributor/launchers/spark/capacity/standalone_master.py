"""What the master of a standalone cluster reports about its workers and applications."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Mapping
from typing import Any

from distributor.core.text import counted
from distributor.launchers.spark.capacity.machines import Capacity, Machines

MASTER = "spark://"
UI_PORT = 8080
"""The port of the master's web page, unless ``spark.master.ui.port`` sets another."""
ANSWER_SECONDS = 2.0
"""Seconds for the master to answer."""


def ask_master(url: str, ui_port: int, application: str | None) -> Machines | None:
    """Ask a standalone master for its workers and applications, over its web page's JSON."""
    for address in url.removeprefix(MASTER).split(","):
        host = address.rpartition(":")[0]
        with contextlib.suppress(Exception):
            report = _json_of(f"http://{host}:{ui_port}/json/")
            if report["status"] == "ALIVE" and report["url"] in (f"{MASTER}{address}", url):
                return _machines_in(report, application)
    return None


def _json_of(address: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(address, timeout=ANSWER_SECONDS) as answer:
        return json.load(answer)


def _machines_in(report: Mapping[str, Any], application: str | None) -> Machines:
    alive = [worker for worker in report["workers"] if worker["state"] == "ALIVE"]
    return Machines(
        total=tuple(_capacity(worker, "") for worker in alive),
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
