"""A program that sets its own rendezvous address, and one that starts its processes itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.ports import free_port

from distributor import TorchDistributor
from distributor.node.worker.libraries import RUN_ID, USE_AGENT_STORE, _choose_store

pytest.importorskip("torch")
cloudpickle.register_pickle_by_value(sys.modules[__name__])
DEADLINE = 60.0


def sum_of_ranks(init_method: str | None = None, **where: Any) -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=init_method, **where)
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def with_own_addresses(*ports: int) -> list[float]:
    """Use an own address in both ways, then the run's; report, which needs the run's store."""
    from distributor import train

    run_port = os.environ["MASTER_PORT"]
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(ports[0])
    sums = [sum_of_ranks()]
    train.report({"sum": sums[0]})
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sums.append(sum_of_ranks(f"tcp://127.0.0.1:{ports[1]}", rank=rank, world_size=size))
    os.environ["MASTER_PORT"] = run_port
    return [*sums, sum_of_ranks()]


def test_a_rendezvous_at_an_address_that_the_program_sets(tmp_path: Path) -> None:
    ranks = TorchDistributor(2, use_gpu=False, timeout=DEADLINE, storage_path=str(tmp_path))
    assert ranks.run_all(with_own_addresses, free_port(), free_port()) == [[3.0] * 3] * 2


def of_spawned(local_rank: int, size: int, port: int, folder: str) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(port)
    total = sum_of_ranks(rank=local_rank, world_size=size)
    Path(folder, str(local_rank)).write_text(str(total))


def spawn(size: int, port: int, folder: str) -> None:
    import torch.multiprocessing as mp

    mp.spawn(of_spawned, args=(size, port, folder), nprocs=size)


def test_a_rank_starts_processes_that_train(tmp_path: Path) -> None:
    """Their function is pickled by value, as that of a notebook is."""
    TorchDistributor(1, use_gpu=False, timeout=DEADLINE).run(spawn, 2, free_port(), str(tmp_path))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "3.0", "1": "3.0"}


WITH_AN_AGENT = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.launcher import LaunchConfig, elastic_launch

def work():
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(total)
    Path(os.environ["OUT"], os.environ["RANK"]).write_text(str(total.item()))
    dist.destroy_process_group()

if __name__ == "__main__":
    if sys.argv[1:]:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="another", rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", monitor_interval=0.1, start_method=sys.argv[1],
        )
        elastic_launch(config, work)()
    else:
        work()
"""
"""A program that starts its processes with torch's launcher, or is started with it."""


def run_torchrun(*args: str) -> None:
    import subprocess

    subprocess.run([sys.executable, "-m", "torch.distributed.run", *args], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["elastic_launch", "torchrun"])
def test_a_rank_starts_processes_with_torchs_launcher(tmp_path: Path, launcher: str) -> None:
    program, out = tmp_path / "program.py", tmp_path / "out"
    program.write_text(WITH_AN_AGENT)
    out.mkdir()
    ranks = TorchDistributor(1, use_gpu=False, timeout=120, env={"OUT": str(out)})
    if launcher == "elastic_launch":
        ranks.run(program, "spawn")
    else:
        ranks.run(run_torchrun, "--nproc-per-node=2", f"--master-port={free_port()}", str(program))
    assert {path.name: path.read_text() for path in out.iterdir()} == {"0": "3.0", "1": "3.0"}


ELSEWHERE = "192.0.2.7"
"""An address of no machine."""


@pytest.mark.parametrize(("wanted", "port"), [("localhost", 12355), ("::1", 29500)])
def test_loopback_is_refused_if_rank_0_is_on_another_machine(
    monkeypatch: pytest.MonkeyPatch, wanted: str, port: int
) -> None:
    monkeypatch.setenv(USE_AGENT_STORE, "True")
    monkeypatch.setenv(RUN_ID, "run")
    with pytest.raises(ValueError, match="Do not set MASTER_ADDR") as refused:
        _choose_store(ELSEWHERE, 29500, "run", wanted, port)
    assert f"rank 0 is on another machine ({ELSEWHERE})" in str(refused.value)
