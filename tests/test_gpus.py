"""Which GPUs each rank sees, on Spark clusters and machines whose GPUs are made up.

A discovery script is all that Spark knows of a GPU, so one that echoes addresses will do. Each
configuration has a driver process of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from distributor import TorchDistributor
from distributor.node.agent.worker_env import mask_entries, visible_devices

CLUSTER = "local-cluster[2,2,1024]"
UNSET = "'spark.task.resource.gpu.amount' was unset, so gpu usage is unavailable"
IGNORE_SSL = "pytorch.spark.distributor.ignoreSsl"
CUT = (
    "'num_processes' cannot be set to a value greater than the number of available GPUs on the "
    "driver, which is 2. 'num_processes' was reset to be equal to the number of available GPUs."
)
NOT_A_NUMBER = (
    "Found GPU addresses ['GPU-abc'] which are not all in the correct format for "
    "CUDA_VISIBLE_DEVICES, which requires integers with no zero padding."
)

DRIVER = """
import json, os, sys, time
from distributor import TorchDistributor

NAMES = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK CUDA_VISIBLE_DEVICES".split()
told = {}

def seen():
    # An executor of local-cluster is known by its folder.
    return {**{name: os.environ.get(name) for name in NAMES}, "executor": os.getcwd()}

def ranks(num_processes, local_mode=False, use_gpu=True, **settings):
    settings = {"timeout": 120, **settings}
    return TorchDistributor(num_processes, local_mode, use_gpu, **settings).run_all(seen)

def error_of(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return [[kind.__name__ for kind in type(error).__mro__], str(error)]
"""

START_SPARK = """
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
from pyspark.sql import SparkSession

builder = SparkSession.builder.config("spark.ui.enabled", "false")
for key, value in json.loads(sys.argv[1]).items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("OFF")
"""


class Answer(NamedTuple):
    """What a driver told, and what its user saw."""

    told: dict[str, Any]
    stderr: str


Ask = Callable[..., Answer]


@pytest.fixture
def ask(
    run_driver: Callable[..., subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> Ask:
    """Run lines of a driver that fill ``told``, in a Spark session of this configuration."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def ask(lines: str, conf: dict[str, str] | None = None, **environment: str) -> Answer:
        start = "" if conf is None else START_SPARK
        source = DRIVER + start + textwrap.dedent(lines) + "\nprint(json.dumps(told))"
        done = run_driver(source, json.dumps(conf), env=environment)
        return Answer(json.loads(done.stdout.splitlines()[-1]), done.stderr)

    return ask


def script(folder: Path, name: str, *lines: str) -> str:
    path = folder / name
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def discovery(tmp_path: Path) -> Callable[..., str]:
    """Make a discovery script that finds these addresses."""

    def make(*addresses: str) -> str:
        found = json.dumps({"name": "gpu", "addresses": addresses})
        return script(tmp_path, "discover.sh", f"echo '{found}'")

    return make


def cluster(discovery_script: str, gpus: int = 2, master: str = CLUSTER) -> dict[str, str]:
    return {
        "spark.master": master,
        "spark.worker.resource.gpu.amount": str(gpus),
        "spark.worker.resource.gpu.discoveryScript": discovery_script,
        "spark.executor.resource.gpu.amount": str(gpus),
    }


def local(discovery_script: str, gpus: int) -> dict[str, str]:
    return {
        "spark.master": "local[2]",
        "spark.driver.resource.gpu.amount": str(gpus),
        "spark.driver.resource.gpu.discoveryScript": discovery_script,
    }


def check_numbers(ranks: list[dict[str, str]], world_size: int, per_task: int) -> None:
    assert [
        (
            rank["RANK"],
            rank["GROUP_RANK"],
            rank["LOCAL_RANK"],
            rank["LOCAL_WORLD_SIZE"],
            rank["WORLD_SIZE"],
        )
        for rank in ranks
    ] == [
        (str(rank), str(rank // per_task), str(rank % per_task), str(per_task), str(world_size))
        for rank in range(world_size)
    ]


def check_gpus(
    ranks: list[dict[str, str]], per_task: int, gpus: set[str], sharers: int = 1
) -> None:
    """Each task has as many GPUs as ranks, and no GPU has more tasks than it may."""
    users: Counter[tuple[str, str]] = Counter()
    for first in range(0, len(ranks), per_task):
        task = ranks[first : first + per_task]
        masks = {rank["CUDA_VISIBLE_DEVICES"] for rank in task}
        assert len(masks) == 1, task
        entries = masks.pop().split(",")
        assert len(set(entries)) == len(entries) == per_task
        assert set(entries) <= gpus
        users.update((task[0]["executor"], entry) for entry in entries)
    assert max(users.values()) <= sharers, users


@pytest.mark.spark
@pytest.mark.parametrize(
    ("amount", "per_task", "sharers"),
    [
        ("2", 2, 1),
        pytest.param("0.5", 1, 2, marks=pytest.mark.slow),
        pytest.param("1", 1, 1, marks=pytest.mark.slow),
    ],
)
def test_each_task_has_the_gpus_that_spark_gave_it(
    ask: Ask, discovery: Callable[..., str], amount: str, per_task: int, sharers: int
) -> None:
    told, stderr = ask(
        """
        told["2"], told["4"] = ranks(2), ranks(4)
        told["3"] = error_of(TorchDistributor, 3, local_mode=False)
        # What spark.executorEnv does, without a cluster of its own.
        spark.sparkContext.environment["CUDA_VISIBLE_DEVICES"] = "4,5"
        told["4, mask"] = ranks(4)
        told["cpu"] = ranks(1, use_gpu=False)
        """,
        cluster(discovery("0", "1")) | {"spark.task.resource.gpu.amount": amount},
    )
    for name, gpus in (("2", {"0", "1"}), ("4", {"0", "1"}), ("4, mask", {"4", "5"})):
        check_numbers(told[name], int(name[0]), per_task)
        check_gpus(told[name], per_task, gpus, sharers)
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in told["cpu"]] == [""]
    if per_task == 1:
        assert told["3"] is None
    else:
        kinds, words = told["3"]
        assert kinds[0] == "RuntimeError"
        assert words == (
            "TorchDistributor 'num_processes' value (3) must be a multiple of "
            "'spark.task.resource.gpu.amount' (2) value."
        )
    for word in ("Started", "Finished"):
        for num_processes in (1, 2, 4):
            what = f"distributed training with {num_processes} executor processes"
            assert f"{word} {what}" in stderr


@pytest.mark.slow
@pytest.mark.spark
def test_without_gpus_for_tasks_the_job_asks_for_its_own(
    ask: Ask, discovery: Callable[..., str]
) -> None:
    """PySpark 4 takes a resource profile for one job; before, it is the error that it was."""
    told, _ = ask(
        """
        import pyspark
        from distributor.launch.spark.session import Session
        from pyspark import TaskContext
        from pyspark.resource import ResourceProfileBuilder

        def others_resources(_):
            return sorted(TaskContext.get().resources())

        def default_profile():
            return spark.sparkContext._jsc.sc().resourceProfileManager().defaultResourceProfile()

        def slots():
            return spark.sparkContext._jsc.sc().maxNumConcurrentTasks(default_profile())

        def session():
            context = spark.sparkContext
            return {
                "sum": spark.range(0, 10, 1, 4).groupBy().sum().first()[0],
                "conf": sorted(context.getConf().getAll()),
                "settings": {row.key: row.value for row in spark.sql("SET").collect()},
                "profile": default_profile().id(),
                "slots": slots(),
                "resources": context.parallelize(range(4), 4).map(others_resources).collect(),
            }

        told["version"] = int(pyspark.__version__.split(".")[0])
        if told["version"] >= 4:
            while slots() < 4:  # executors still start
                time.sleep(0.1)
            told["before"] = session()
            for num_processes in (2, 3, 4):
                told[str(num_processes)] = ranks(num_processes)
            told["2 to 4"] = ranks((2, 4))
            told["6"] = error_of(ranks, 6, start_timeout=2)
            told["after"] = session()
            found = [Session(each).gpu_profile(2) for each in (spark, spark.newSession())]
            told["profiles"] = [each.id for each in (*found, ResourceProfileBuilder().build)]
        else:
            told["error"] = error_of(TorchDistributor, 2, local_mode=False)
        told["cpu"] = ranks(2, use_gpu=False)
        """,
        cluster(discovery("0", "1")) | {"spark.executorEnv.CUDA_VISIBLE_DEVICES": "4,5"},
    )
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in told["cpu"]] == ["", ""]
    if told["version"] < 4:
        kinds, words = told["error"]
        assert kinds[0] == "RuntimeError"
        assert words.startswith(UNSET)
        assert "'spark.executor.resource.gpu.amount' is 2" in words
        return
    runs = (("2", 2, 2), ("3", 3, 1), ("4", 4, 2), ("2 to 4", 4, 2))
    for run, num_processes, per_task in runs:
        check_numbers(told[run], num_processes, per_task)
        check_gpus(told[run], per_task, {"4", "5"})
    kinds, words = told["6"]
    assert kinds[0] == "StartTimeout"
    assert "3 barrier tasks are wanted at once" in words
    assert "have room for 2" in words
    assert told["before"]["resources"] == [[]] * 4
    assert told["before"]["sum"] == 45
    assert told["after"] == told["before"]
    assert told["profiles"] == [1, 1, 3], "one for two GPUs, one for one, and now another"


@pytest.mark.spark
def test_an_executor_address_that_is_no_number_is_an_error_before_any_rank(
    ask: Ask, discovery: Callable[..., str], tmp_path: Path
) -> None:
    conf = cluster(discovery("GPU-abc"), gpus=1, master="local-cluster[1,1,1024]")
    told, _ = ask(
        """
        def train(path):
            open(path, "x").close()

        distributor = TorchDistributor(1, local_mode=False, timeout=120)
        told["error"] = error_of(distributor.run, train, os.path.abspath("ran"))
        """,
        conf | {"spark.task.resource.gpu.amount": "1"},
    )
    kinds, words = told["error"]
    assert "RuntimeError" in kinds
    assert f"before its ranks ran: ValueError: {NOT_A_NUMBER}" in words
    assert "get_gpus.sh" in words
    assert not (tmp_path / "ran").exists()


@pytest.mark.spark
def test_on_a_local_master_the_gpus_are_the_drivers(
    ask: Ask, discovery: Callable[..., str]
) -> None:
    told, stderr = ask(
        """
        told["distributed"] = ranks(2)
        told["one"] = ranks(1)
        told["three"] = error_of(TorchDistributor, 3, local_mode=False)
        distributor = TorchDistributor(4, local_mode=True)
        told["num_processes"] = distributor.num_processes
        told["local"] = distributor.run_all(seen)
        told["local cpu"] = ranks(3, local_mode=True, use_gpu=False)
        os.environ["CUDA_VISIBLE_DEVICES"] = "4,5"
        told["distributed, mask"] = ranks(2)
        told["distributed, cpu"] = ranks(2, use_gpu=False)
        told["local, mask"] = ranks(2, local_mode=True)
        told["mask"] = os.environ["CUDA_VISIBLE_DEVICES"]
        """,
        local(discovery("0", "1"), gpus=2),
    )

    def gpus(name: str) -> list[str]:
        return [rank["CUDA_VISIBLE_DEVICES"] for rank in told[name]]

    check_numbers(told["distributed"], 2, per_task=1)
    assert gpus("distributed") == ["0", "1"]
    assert gpus("one") == ["0"]
    kinds, words = told["three"]
    assert kinds[0] == "RuntimeError"
    assert words.startswith(
        "On local[2] the driver needs a GPU for each of the 3 ranks, but it has 2 GPUs"
    )
    assert told["num_processes"] == 2
    assert stderr.count(CUT) == 1
    check_numbers(told["local"], 2, per_task=2)
    assert gpus("local") == ["0,1", "0,1"]
    check_numbers(told["local cpu"], 3, per_task=3)
    assert gpus("local cpu") == ["", "", ""]
    assert gpus("distributed, mask") == ["4", "5"]
    assert gpus("distributed, cpu") == ["", ""]
    assert gpus("local, mask") == ["4,5", "4,5"]
    assert told["mask"] == "4,5"
    for what in (
        "distributed training with 2 executor processes",
        "distributed training with 1 executor processes",
        "local training with 2 processes",
        "local training with 3 processes",
    ):
        assert stderr.count(f"Started {what}") == stderr.count(f"Finished {what}") > 0, stderr


@pytest.mark.spark
def test_gpus_for_tasks_on_a_local_master_are_refused_at_once(
    ask: Ask, discovery: Callable[..., str]
) -> None:
    """Spark itself would let the job wait for ever, without a word."""
    told, _ = ask(
        """
        began = time.monotonic()
        told["distributed"] = error_of(ranks, 1)
        told["seconds"] = time.monotonic() - began
        told["local"] = error_of(ranks, 1, local_mode=True)
        """,
        local(discovery("GPU-abc"), gpus=1)
        | {"spark.executor.resource.gpu.amount": "1", "spark.task.resource.gpu.amount": "1"},
    )
    kinds, words = told["distributed"]
    assert kinds[0] == "RuntimeError"
    assert words.startswith("'spark.task.resource.gpu.amount' is set, but a local[2] master cannot")
    assert told["seconds"] < 10
    kinds, words = told["local"]
    assert kinds[0] == "ValueError"
    assert words.startswith(NOT_A_NUMBER)


@pytest.mark.spark
def test_a_cluster_without_gpus(spark: Any) -> None:
    with pytest.raises(RuntimeError, match="^" + re.escape(UNSET)):
        TorchDistributor(2, local_mode=False)
    with pytest.raises(
        RuntimeError, match=r"'spark\.executor\.resource\.gpu\.amount' is unset too"
    ):
        TorchDistributor(2, local_mode=False)
    ranks = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=120)
    assert ranks.run_all(lambda: os.environ["CUDA_VISIBLE_DEVICES"]) == ["", ""]


@pytest.fixture
def encrypted(spark: Any) -> Iterator[Any]:
    """The session of a cluster that demands encryption."""
    spark.conf.set("spark.ssl.enabled", "true")
    yield spark
    spark.conf.unset("spark.ssl.enabled")
    spark.conf.unset(IGNORE_SSL)


@pytest.mark.spark
@pytest.mark.parametrize("ignored", [None, "false"])
@pytest.mark.parametrize("use_gpu", [False, True])
def test_encryption_is_not_promised(encrypted: Any, use_gpu: bool, ignored: str | None) -> None:
    if ignored:
        encrypted.conf.set(IGNORE_SSL, ignored)
    with pytest.raises(RuntimeError, match="This cluster has TLS encryption enabled") as raised:
        TorchDistributor(2, local_mode=False, use_gpu=use_gpu)
    assert f"you may set '{IGNORE_SSL}' to 'true'" in str(raised.value)


@pytest.mark.spark
def test_who_waives_encryption_is_warned(encrypted: Any, warned: Callable[[], list[str]]) -> None:
    encrypted.conf.set(IGNORE_SSL, "true")
    ranks = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=120)
    (warning,) = warned()
    assert "sent between nodes unencrypted" in warning
    assert ranks.run(lambda: "trained") == "trained"


@pytest.mark.spark
def test_local_mode_sends_nothing_over_the_network(
    encrypted: Any, warned: Callable[[], list[str]]
) -> None:
    TorchDistributor(2, local_mode=True, use_gpu=False)
    assert warned() == []


def test_without_spark_the_mask_says_which_gpus_there_are(ask: Ask) -> None:
    told, stderr = ask(
        """
        told["2"] = ranks(2, local_mode=True)
        told["1"] = ranks(1, local_mode=True)
        told["mask"] = os.environ["CUDA_VISIBLE_DEVICES"]
        told["imported"] = [name for name in ("pyspark", "torch") if name in sys.modules]
        """,
        CUDA_VISIBLE_DEVICES="3,5",
    )
    check_numbers(told["2"], 2, per_task=2)
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in told["2"]] == ["3,5", "3,5"]
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in told["1"]] == ["3"]
    assert told["mask"] == "3,5"
    assert told["imported"] == []
    for word in ("Started", "Finished"):
        assert f"{word} local training with 2 processes" in stderr
        assert f"{word} local training with 1 processes" in stderr


def test_without_spark_or_mask_the_driver_library_counts_the_gpus(
    ask: Ask, nvml: Callable[..., str]
) -> None:
    told, stderr = ask(
        """
        distributor = TorchDistributor(4)
        told["num_processes"] = distributor.num_processes
        told["ranks"] = distributor.run_all(seen)
        told["mask"] = os.environ.get("CUDA_VISIBLE_DEVICES")
        """,
        LD_LIBRARY_PATH=nvml(2),
    )
    assert told["num_processes"] == 2
    check_numbers(told["ranks"], 2, per_task=2)
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in told["ranks"]] == ["0,1", "0,1"]
    assert told["mask"] is None
    assert stderr.count(CUT) == 1


@pytest.mark.parametrize(
    ("count", "status", "mask"),
    [
        (0, {}, {}),
        (2, {"init": 9}, {}),
        (2, {"counted": 999}, {}),
        (2, {}, {"CUDA_VISIBLE_DEVICES": ""}),
        (2, {}, {"CUDA_VISIBLE_DEVICES": "-1"}),
    ],
    ids=["none", "no driver", "lost GPUs", "all hidden", "all hidden by -1"],
)
def test_no_gpu_anywhere(
    ask: Ask,
    nvml: Callable[..., str],
    count: int,
    status: dict[str, int],
    mask: dict[str, str],
) -> None:
    told, _ = ask(
        """
        told["error"] = error_of(TorchDistributor, 1)
        told["cpu"] = error_of(TorchDistributor, 1, use_gpu=False)
        """,
        LD_LIBRARY_PATH=nvml(count, **status),
        **mask,
    )
    kinds, words = told["error"]
    assert kinds[0] == "RuntimeError"
    assert words.startswith("GPUs were unable to be found on the driver.")
    assert told["cpu"] is None


GET_GPUS = Path(__file__).parents[1] / "conf" / "get_gpus.sh"

NVIDIA_SMI = (
    'test "$1" = --query-gpu=index && test "$2" = --format=csv,noheader || exit 6',
    "printf '0\\n1\\n2\\n3\\n'",
)
"""A machine of four GPUs."""


def discover(path: str, mask: str | None) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": path} | ({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})
    return subprocess.run(
        ["/bin/sh", str(GET_GPUS)], env=environment, capture_output=True, text=True, timeout=30
    )


needs_get_gpus = pytest.mark.skipif(not GET_GPUS.exists(), reason="there is no conf/get_gpus.sh")


@needs_get_gpus
@pytest.mark.parametrize(
    ("mask", "addresses"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2,3", ["0", "1"]),
        (" 3 , 2 ", ["0", "1"]),
        ("GPU-11,MIG-22", ["0", "1"]),
        ("1,-1,2", ["0"]),
        ("1,9,2", ["0"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_the_discovery_script_lists_positions_in_the_mask(
    mask: str | None, addresses: list[str], tmp_path: Path
) -> None:
    script(tmp_path, "nvidia-smi", *NVIDIA_SMI)
    done = discover(f"{tmp_path}:/usr/bin:/bin", mask)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"name": "gpu", "addresses": addresses}
    entries = tuple(addresses) if mask is None else mask_entries(mask)[: len(addresses)]
    assert visible_devices(addresses, mask) == entries


@needs_get_gpus
@pytest.mark.parametrize("nvidia_smi", [None, ("echo 'Failed to initialize NVML'", "exit 9")])
def test_a_discovery_that_fails_finds_no_gpus(
    nvidia_smi: tuple[str, ...] | None, tmp_path: Path
) -> None:
    """Spark then says so, where an empty list would be taken for an answer."""
    if nvidia_smi:
        script(tmp_path, "nvidia-smi", *nvidia_smi)
    done = discover(str(tmp_path), mask=None)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "nvidia-smi" in done.stderr
