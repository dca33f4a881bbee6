"""Runs on hosts with IPv6 addresses: the driver alone, or every host."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest
from conftest import needs_java
from support.cluster import cluster_on
from support.machines import machines_apart, why_not_apart

pytestmark = [pytest.mark.spark, needs_java]


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")
needs_namespaces = pytest.mark.skipif(
    os.getuid() != 0 or bool(why_not_apart()),
    reason="this machine cannot create network namespaces",
)

PROGRAM = """
def train():
    import os, socket
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(())
    dist.all_reduce(total)
    print("rank", dist.get_rank(), "is here", flush=True)
    dist.destroy_process_group()
    return total.item(), os.environ["MASTER_ADDR"], os.environ.get("GLOO_SOCKET_IFNAME")

found = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=120).run(train)
send(found=found)
"""


@pytest.mark.slow
@needs_namespaces
@needs_ipv6
def test_hosts_with_only_ipv6(tmp_path: Path) -> None:
    with (
        machines_apart(4, ipv6=True) as machines,
        cluster_on(machines, tmp_path) as cluster,
        cluster.driver(PROGRAM) as driver,
    ):
        found = driver.receive("found")["found"]
        log = driver.log.read_text()
    workers = [machine.address for machine in cluster.on_workers]
    assert found[0] == 2.0
    assert found[1] in workers
    assert found[2] == "eth0"
    assert log.count("is here") == 2, "the ranks' output arrives over the link"
