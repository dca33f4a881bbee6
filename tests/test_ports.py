"""Ports that an administrator can open a firewall for."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
from conftest import needs_java
from support.cluster import cluster_on
from support.machines import Machine, machines_apart, why_not_apart
from support.ports import free_port
from support.waiting import until

from distributor import TorchDistributor
from distributor.errors import ExecutorNotReady


def master_port(port: int) -> int:
    import os
    import socket

    with socket.create_connection(("127.0.0.1", port), 120) as connection:
        connection.recv(1)
    return int(os.environ["MASTER_PORT"])


def test_runs_take_ports_of_a_range_and_name_one_without_a_free_port() -> None:
    first = free_port()
    runner = TorchDistributor(1, use_gpu=False, rank_ports=f"{first}-{first + 19}", timeout=120)
    with socket.create_server(("127.0.0.1", 0)) as server:
        runs = [runner.submit(master_port, server.getsockname()[1]) for _ in range(2)]
        server.settimeout(120)
        ranks = [server.accept()[0] for _ in runs]  # both are active
        for rank in ranks:
            rank.close()
        one, other = [run.result(120) for run in runs]
    assert one != other
    assert {one, other} <= {*range(first, first + 20)}

    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        runner = TorchDistributor(1, use_gpu=False, rank_ports=str(port))
        with pytest.raises(ExecutorNotReady, match=f"rank_ports is '{port}-{port}', and on "):
            runner.run(os.getpid)


HUB, RANKS, SYSTEM = 7200, range(29500, 29510), range(31000, 31200)
TRAIN = f"""
import pathlib, time

def train(folder):
    import os, socket, time
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(())
    dist.all_reduce(total)
    here = pathlib.Path(folder, "rank" + os.environ["RANK"])
    here.touch()
    deadline = time.monotonic() + 60
    while not here.with_suffix(".seen").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return total.item()

runner = TorchDistributor(
    2,
    local_mode=False,
    use_gpu=False,
    timeout=120,
    hub_port={HUB},
    rank_ports="{RANKS[0]}-{RANKS[-1]}",
)
_channel.recv(100)
send(total=runner.run(train, {{folder!r}}))
"""


def restrict_system_ports(machine: Machine) -> None:
    setting = f"echo {SYSTEM[0]} {SYSTEM[-1]} > /proc/sys/net/ipv4/ip_local_port_range"
    subprocess.run(["ip", "netns", "exec", machine.namespace, "sh", "-c", setting], check=True)


@pytest.mark.slow
@pytest.mark.spark
@needs_java
@pytest.mark.skipif(
    os.getuid() != 0 or bool(why_not_apart()), reason="no network namespaces can be made here"
)
def test_between_hosts_a_run_listens_at_the_documented_ports_alone(tmp_path: Path) -> None:
    """These are hub_port and rank_ports; gloo uses the system's range of ports."""
    with machines_apart(4) as machines, cluster_on(machines, tmp_path, start=False) as cluster:
        for machine in machines:
            restrict_system_ports(machine)
        cluster.start()
        with cluster.driver(TRAIN.format(folder=str(tmp_path))) as driver:
            driver.receive("ready")
            before = [machine.listening_ports(loopback=False) for machine in machines]
            ranks = [tmp_path / f"rank{rank}" for rank in range(2)]
            driver.send("begin")
            until(
                lambda: all(rank.exists() for rank in ranks),
                "both ranks are in the collective",
                120,
            )
            after = [machine.listening_ports(loopback=False) for machine in machines]
            new = [ports - others for ports, others in zip(after, before, strict=True)]
            for rank in ranks:
                rank.with_suffix(".seen").touch()
            assert driver.receive("total")["total"] == 2.0
    _, of_driver, *of_workers = new
    assert of_driver == {HUB}
    stores = [port for ports in of_workers for port in ports if port in RANKS]
    assert len(stores) == 1
    others = {port for ports in of_workers for port in ports} - {*stores}
    assert others
    assert others <= {*SYSTEM}
