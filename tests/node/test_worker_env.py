"""The environment variables of a rank, compared with torchrun's and with tables."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distributor import TorchDistributor
from distributor.core.versions import release
from distributor.node.agent import network
from distributor.node.agent.network import routable_address
from distributor.node.agent.worker_env import (
    RANK_VARIABLES,
    node_order,
    rank_environment,
    visible_devices,
)
from distributor.node.process.specs import NodeShare
from distributor.run_spec import Settings
from distributor.settings import rank_settings
from distributor.spark.plan import driver_gpus

DUMP = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(dict(os.environ)))
"""

# fmt: off
TORCHRUN = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS",
}
# fmt: on
"""The variables that torch's documentation and ``LocalElasticAgent`` promise to every worker."""

TORCHRUN_INTERNAL = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
"""Variables between torchrun and its own processes, for its error file and its signals."""

OURS_ALONE = {
    "NODE_RANK",  # PySpark's class sets it
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "ACCELERATE_USE_CPU",
}

DIFFERS_BY_RUN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
# In torch 2.4, the store of torchrun's agent is not yet that of the ranks.
DIFFERS_BY_TORCH = (
    {"TORCHELASTIC_USE_AGENT_STORE"} if release(torch.__version__) == (2, 4) else set()
)

NODE = NodeShare(
    run_id="a-run",
    attempt=3,
    host="there",
    address="127.0.0.1",
    node_rank=2,
    num_nodes=4,
    ranks_per_node=2,
    master_addr="10.0.0.7",
    master_port=29501,
    secret=bytes(32),
    settings=rank_settings(Settings()),
)


def read_dumps(folder: Path) -> list[dict[str, str]]:
    return [json.loads((folder / rank).read_text()) for rank in "01"]


def test_ranks_have_torchruns_variables_five_more_and_the_inherited_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One script's environment on two ranks, under torchrun and under TorchDistributor."""
    script = tmp_path / "dump.py"
    script.write_text(DUMP)
    for name in ("torchrun", "ours"):
        (tmp_path / name).mkdir()
    for name in TORCHRUN | TORCHRUN_INTERNAL | OURS_ALONE:
        monkeypatch.delenv(name, raising=False)
    inherited = dict(os.environ)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*torchrun, "--nproc-per-node=2", str(script), str(tmp_path / "torchrun")],
        env=inherited,  # without variables that C code, such as readline's, has set
        check=True,
        timeout=120,
    )
    distributor = TorchDistributor(2, local_mode=True, use_gpu=False, timeout=120)
    distributor.run(str(script), str(tmp_path / "ours"))

    all_of_torchrun, all_of_ours = read_dumps(tmp_path / "torchrun"), read_dumps(tmp_path / "ours")
    for theirs, ours in zip(all_of_torchrun, all_of_ours, strict=True):
        added, added_by_us = (
            {name for name in rank if inherited.get(name) != rank[name]} for rank in (theirs, ours)
        )
        assert added - TORCHRUN_INTERNAL == TORCHRUN
        assert added_by_us - OURS_ALONE == TORCHRUN
        same = TORCHRUN - DIFFERS_BY_RUN - DIFFERS_BY_TORCH
        assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
        assert {name: ours.get(name) for name in inherited} == inherited
    for ranks in (all_of_torchrun, all_of_ours):
        for name in DIFFERS_BY_RUN:
            assert ranks[0][name] == ranks[1][name]


def test_ranks_of_a_later_node_are_numbered_after_those_of_earlier_nodes() -> None:
    first, second = (rank_environment(NODE, local_rank, {}) for local_rank in range(2))
    expected = {
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "29501",
        "NODE_RANK": "2",
        "RANK": "5",
        "ROLE_RANK": "5",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "WORLD_SIZE": "8",
    }
    assert {name: second[name] for name in expected} == expected
    assert first == {**second, "RANK": "4", "ROLE_RANK": "4", "LOCAL_RANK": "0"}


def test_ranks_without_gpus_are_ranks_for_accelerate_too() -> None:
    name, on_cpus = "ACCELERATE_USE_CPU", replace(NODE, gpus=())
    assert rank_environment(replace(on_cpus, env={name: "false"}), 0, {})[name] == "false"
    assert name not in rank_environment(replace(NODE, gpus=("0", "1")), 0, {})
    assert name not in rank_environment(replace(on_cpus, ranks_per_node=1, num_nodes=1), 0, {})


def test_the_users_variable_overrides_the_inherited_one_and_that_overrides_the_default() -> None:
    name = "OMP_NUM_THREADS"
    users = replace(NODE, env={name: "user"})
    assert rank_environment(NODE, 0, {})[name] not in ("user", "machine")
    assert rank_environment(NODE, 0, {name: "machine"})[name] == "machine"
    assert rank_environment(users, 0, {name: "machine"})[name] == "user"


def test_variables_that_identify_a_rank_cannot_be_overridden() -> None:
    stale = dict.fromkeys(RANK_VARIABLES, "stale")
    right = rank_environment(NODE, 1, {})
    assert rank_environment(NODE, 1, stale) == right
    assert rank_environment(replace(NODE, env=stale), 1, {}) == right


def test_ranks_see_the_gpus_of_their_node() -> None:
    name = "CUDA_VISIBLE_DEVICES"
    on_cpus, on_gpus = replace(NODE, gpus=()), replace(NODE, gpus=("5", "4"))
    assert name not in rank_environment(NODE, 0, {})
    assert rank_environment(NODE, 0, {name: "4,5"})[name] == "4,5", "without Spark"
    assert rank_environment(on_cpus, 0, {name: "4,5"})[name] == ""
    assert rank_environment(on_gpus, 1, {name: "4,5,6"})[name] == "5,4"
    assert rank_environment(replace(on_gpus, env={name: "7"}), 0, {})[name] == "7"


@pytest.mark.parametrize(
    ("addresses", "mask", "entries"),
    [
        ([], "4,5", ()),
        (["10", "2"], None, ("10", "2")),
        (["1", "0"], "4,5", ("5", "4")),
        (["1"], " 4 , 5 ,", ("5",)),
        (["1"], "1,2", ("2",)),  # not the entry 1, which is that of address 0
        (["5", "4"], "4,5", ("5", "4")),
        (["0"], "MIG-GPU-11/1/0", ("MIG-GPU-11/1/0",)),
    ],
)
def test_spark_addresses_are_positions_in_the_mask(
    addresses: list[str], mask: str | None, entries: tuple[str, ...]
) -> None:
    assert visible_devices(addresses, mask) == entries


def test_an_address_that_no_gpu_has_is_refused() -> None:
    for address in ("01", "GPU-uuid", "", "-1"):
        with pytest.raises(ValueError, match="requires integers with no zero padding"):
            visible_devices(["0", address], "0,1")
    for addresses, mask in (
        (["2"], "4,5"),
        (["4", "0"], "4,5"),  # ambiguous: an entry and a position
        (["0"], ""),
        (["2"], "4,-1,5"),
    ):
        message = f"Spark assigned the GPU addresses {addresses}, but CUDA_VISIBLE_DEVICES={mask!r}"
        with pytest.raises(ValueError, match=re.escape(message)):
            visible_devices(addresses, mask)


def test_without_spark_the_variable_lists_the_drivers_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """-1 ends the list, as in CUDA."""
    for mask, gpus in {"": (), "3, 5,": ("3", "5"), "GPU-1": ("GPU-1",), "3,-1,5": ("3",)}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
        assert driver_gpus(None) == gpus


def test_nodes_of_one_host_are_adjacent() -> None:
    assert node_order(["b", "a"]) == [0, 1]
    assert node_order(["c", "b", "a", "a", "b", "c"]) == [0, 5, 1, 4, 2, 3]


def test_a_loopback_address_is_used_only_if_all_peers_are_on_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names are resolved as by Debian: a machine's own name is loopback, its peers' are not."""
    known = {"here": ["127.0.1.1"], "named": ["10.1.2.3"], "both": ["fd00::3", "10.1.2.3"]}

    def getaddrinfo(name: str, *_: Any, **__: Any) -> list[Any]:
        families = {True: socket.AF_INET6, False: socket.AF_INET}
        return [(families[":" in each], 1, 6, "", (each, 0)) for each in known.get(name, [name])]

    monkeypatch.setattr("distributor.core.addresses.socket.getaddrinfo", getaddrinfo)
    monkeypatch.setattr(network, "source_address", {"there": "10.1.2.3"}.__getitem__)
    assert routable_address("here", ["here", "here"]) == "127.0.1.1"
    for name in ("here", "named", "both"):
        assert routable_address(name, [name, "there"]) == "10.1.2.3"
