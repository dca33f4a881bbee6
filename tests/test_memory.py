"""The memory that ranks need and their container has, and the warning if it is too little."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from conftest import facts_in
from support.waiting import until

from distributor.core import resources
from distributor.core.resources import ContainerMemory, container_memory
from distributor.launchers.spark.executors import container_shortage
from distributor.node.agent.node_warnings import MIB

RunDriver = Callable[..., "subprocess.CompletedProcess[str]"]
YARN, KUBERNETES = {"spark.master": "yarn"}, {"spark.master": "k8s://https://host:6443"}


def shortage(conf: Mapping[str, str], tasks: int = 2, ranks: int = 1, warm: bool = True) -> str:
    return container_shortage(conf.get, tasks, ranks, warm=warm) or ""


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        (YARN, "has 403 MB beside its Java heap"),
        (YARN | {"spark.executor.memory": "4096"}, "has 429 MB"),
        (YARN | {"spark.executor.memoryOverhead": "300"}, "spark.executor.memoryOverhead=300"),
        (KUBERNETES | {"spark.kubernetes.memoryOverheadFactor": "0.45"}, "has 483 MB"),
        (YARN | {"spark.executor.memoryOverheadFactor": "0.45"}, "has 483 MB"),
    ],
)
def test_containers_that_are_too_small_are_reported_with_figures(
    conf: dict[str, str], expected: str
) -> None:
    text = shortage(conf)

    assert expected in text
    assert "1 rank in it, with Spark's own processes, need at least 545 MB" in text
    assert "Make the session with spark.executor.memoryOverhead=520m, and" in text
    assert not shortage(conf | {"spark.executor.memoryOverhead": "520m"})
    assert shortage(conf | {"spark.executor.memoryOverhead": "519m"})
    assert not shortage({**conf, "spark.master": "spark://host:7077"}), "it has no limits"


def test_all_ranks_of_one_executor_are_counted() -> None:
    enough = YARN | {"spark.executor.memoryOverhead": "800m"}
    assert not shortage(enough, tasks=2)
    assert "4 ranks" in shortage(enough, tasks=2, ranks=4)
    assert "4 ranks" in shortage(enough, tasks=8)
    assert not shortage(enough | {"spark.executor.instances": "8"}, tasks=8)
    assert shortage(enough, tasks=4, warm=False)


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cgroup of version 2, two levels deep, in a folder that replaces the kernel's."""
    (tmp_path / "own").write_text("1:name=systemd:/elsewhere\n0::/outer/inner\n")
    folder = tmp_path / "cgroup" / "outer" / "inner"
    folder.mkdir(parents=True)
    monkeypatch.setattr(resources, "CGROUPS", str(tmp_path / "cgroup"))
    monkeypatch.setattr(resources, "OWN_GROUPS", str(tmp_path / "own"))
    return folder


def set_limit(folder: Path, most: int | str, used: int, cached: int = 0) -> None:
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")


def test_the_tightest_limit_of_the_group_and_its_parents_counts(group: Path) -> None:
    assert container_memory() is None
    set_limit(group, "max", 5)
    assert container_memory() is None
    set_limit(group, 1000, 900, 50)
    assert container_memory() == ContainerMemory(left=150, most=1000)
    set_limit(group.parent, 2000, 1990)
    assert container_memory() == ContainerMemory(left=10, most=2000)
    set_limit(group.parent, 2000, 2100)
    assert container_memory() == ContainerMemory(left=0, most=2000)


LIMITED = """
import json, logging, os, sys
{limit}
logging.basicConfig(format="WARNED %(message)s", level=logging.WARNING)

from distributor import TorchDistributor

def run():
    # Ranks that start fresh and need no torch stay below the limit.
    runner = TorchDistributor(2, local_mode=True, use_gpu=False, warm=False, timeout=60)
    return runner.run(int, "7")

print("FACTS " + json.dumps({{"values": [run(), run()]}}))
"""


@pytest.fixture
def limited() -> Iterator[str]:
    """A cgroup with a memory limit, below the group of this process; yields code that joins it."""
    name = f"distributor-test-{uuid.uuid4().hex[:8]}"
    lines = Path(resources.OWN_GROUPS).read_text().splitlines()
    own = [line.strip().split(":", 2) for line in lines]
    groups = {controllers: group.lstrip("/") for _, controllers, group in own}
    if "memory" in groups:
        folder = Path(resources.CGROUPS, "memory", groups["memory"], name)
        file = "memory.limit_in_bytes"
    else:
        folder, file = Path(resources.CGROUPS, groups.get("", ""), name), "memory.max"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"a cgroup cannot be created here: {error}")
    try:
        try:
            (folder / file).write_text(str(400 * MIB))
        except OSError as error:
            pytest.skip(f"the memory of a cgroup cannot be limited here: {error}")
        yield f"open({str(folder / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
    finally:
        members = folder / "cgroup.procs"
        until(lambda: not members.read_text().strip(), "the group's processes end", 60)
        folder.rmdir()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has cgroups")
def test_a_memory_limit_is_warned_about_once(limited: str, run_driver: RunDriver) -> None:
    done = run_driver(LIMITED.format(limit=limited))

    assert facts_in(done)["values"] == [7, 7]
    warned = [line for line in done.stderr.splitlines() if line.startswith("WARNED On ")]
    assert len(warned) == 1, done.stderr
    assert "2 ranks in this container need at least 493 MB" in warned[0]
    assert "left of 419 MB)" in warned[0]
