"""``@distributed``: number and place of the ranks, their values, and cancellation."""

from __future__ import annotations

import concurrent.futures
import ipaddress
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from conftest import facts_in, needs_java
from support.waiting import assert_gone, until

from distributor import (
    RunTimeout,
    UnpicklableError,
    distributed,
    runtime,
    serverless,
    serverless_gpu,
)
from distributor.air import compute as air_compute
from distributor.air import exceptions
from distributor.core.gpus import AcceleratorType, GPUType, describe, is_of_type, split_accelerator
from distributor.ray import ray_launch
from distributor.screen.one_time_warnings import warn_once
from distributor.serverless_gpu import compute, launcher
from distributor.serverless_gpu import runtime as their_runtime

cloudpickle.register_pickle_by_value(sys.modules[__name__])
RunDriver = Callable[..., "subprocess.CompletedProcess[str]"]
POOLS_FILE = Path(__file__).parents[1] / "conf" / "fairscheduler.xml"


@pytest.fixture(
    params=[False, pytest.param(True, marks=pytest.mark.spark(shared=True))],
    ids=["local", "cluster"],  # by which the tests of the shared session are recognized
)
def remote(request: pytest.FixtureRequest) -> bool:
    """Return whether the ranks run on executors, instead of on this machine."""
    if request.param:
        request.getfixturevalue("spark")
    return bool(request.param)


def who(*added: object, **named: object) -> tuple[Any, ...]:
    return (
        runtime.get_global_rank(),
        runtime.get_local_rank(),
        runtime.get_node_rank(),
        runtime.get_world_size(),
        *added,
        named,
    )


def ranks_in_a_group() -> tuple[int, int, int]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    group = dist.new_group([1, 2])
    found = runtime.get_global_rank(), runtime.get_global_rank(group)
    dist.barrier()  # no rank leaves while another one still connects
    dist.destroy_process_group()
    return *found, runtime.get_local_world_size()


def test_a_rank_has_a_number_in_each_of_its_groups() -> None:
    fn = distributed(gpus=3, use_gpu=False, timeout=120)(ranks_in_a_group)

    assert fn.distributed() == [(0, -1, 3), (1, 0, 3), (2, 1, 3)]


def test_a_plain_call_runs_once_here() -> None:
    here = distributed(gpus=2, use_gpu=False)(lambda: (os.getpid(), who()))

    assert here() == (os.getpid(), (0, 0, 0, 1, {}))


def test_every_ranks_result_comes_in_the_order_of_ranks(remote: bool) -> None:
    fn = distributed(gpus=3, use_gpu=False, remote=remote, timeout=120)(who)

    places = [(0, 0), (0, 0), (0, 0)] if remote else [(0, 0), (1, 0), (2, 0)]
    found = fn.distributed("a", named=1)
    assert [each[0] for each in found] == [0, 1, 2]
    assert [each[3:] for each in found] == [(3, "a", {"named": 1})] * 3
    if not remote:
        assert [each[1:3] for each in found] == places
    else:
        assert sorted(each[2] for each in found) == [0, 1, 2], "each task is a node"


def test_the_decorated_function_keeps_its_name_and_can_be_pickled_by_name() -> None:
    @distributed(gpus=2, use_gpu=False, timeout=120)
    def countdown(number: int) -> list[int]:
        """Count down."""
        return [number, *(countdown(number - 1) if number else [])]

    assert countdown.__name__ == "countdown"
    assert countdown.__doc__ == "Count down."
    assert countdown.distributed(2) == [[2, 1, 0]] * 2


class Model:
    """A class of this module, which the ranks get by value."""

    kind = "linear"

    def __init__(self, scale: int) -> None:
        self.scale = scale

    @distributed(gpus=2, use_gpu=False, timeout=120, env={"API_KEY": "a secret of the launcher"})
    def fit(self, x: int) -> tuple[int, int]:
        """Scale x."""
        return runtime.get_global_rank(), self.scale * x

    @distributed(gpus=2, use_gpu=False, timeout=120)
    @classmethod
    def name_kind(cls, suffix: str) -> str:
        return cls.kind + suffix

    @distributed(gpus=1, use_gpu=False, timeout=120)
    @staticmethod
    def double(x: int) -> int:
        return 2 * x

    @staticmethod
    @distributed(gpus=1, use_gpu=False, timeout=120)
    def triple(x: int) -> int:
        return 3 * x

    @distributed(gpus=1, use_gpu=False, timeout=120)
    def start_another_run(self) -> Any:
        return self.fit.distributed(1)

    @distributed(gpus=1, use_gpu=False, timeout=120)
    def itself(self) -> Any:
        return self


def test_methods_get_their_instance_or_class() -> None:
    assert Model(3).fit(2) == (0, 6)
    assert Model(3).fit.distributed(2) == [(0, 6), (1, 6)]
    assert Model.fit.__doc__ == "Scale x."
    assert Model.name_kind.distributed("!") == ["linear!"] * 2
    assert Model(1).name_kind("?") == "linear?"
    assert Model.double.distributed(2) == [4]
    assert Model(1).triple.distributed(2) == [6]


def test_settings_are_not_pickled_with_a_decorated_function() -> None:
    pickled = cloudpickle.dumps(Model(3))

    assert b"API_KEY" not in pickled
    assert b"a secret of the launcher" not in pickled
    with pytest.raises(RuntimeError, match="fit was pickled, and the settings of its runs were"):
        Model(3).start_another_run.distributed()


def test_a_decorated_function_that_a_rank_returns_has_its_settings_here() -> None:
    """cloudpickle replaces the attributes of the class here by those that a rank has sent."""
    [returned] = Model(3).itself.distributed()

    assert type(returned) is Model
    assert returned.fit(2) == (0, 6)
    assert Model.fit.__doc__ == "Scale x."
    assert Model(4).fit.distributed(2) == [(0, 8), (1, 8)]


@pytest.mark.parametrize(
    ("args", "named", "says"),
    [
        ((), {"epoch": 3}, r"train\(epochs, \*, lr=0.1\) cannot be .* 'epochs'"),
        ((1, 2), {}, "too many positional arguments"),
    ],
)
def test_arguments_are_checked_before_anything_starts(
    args: tuple[Any, ...], named: dict[str, Any], says: str
) -> None:
    def train(epochs, *, lr=0.1):  # type: ignore[no-untyped-def]
        raise AssertionError("a rank has started")

    fn = distributed(gpus=2, use_gpu=False)(train)
    for start in (fn.distributed, fn.distributed_async):
        with pytest.raises(TypeError, match=says):
            start(*args, **named)


def test_variables_are_forwarded_by_pattern(remote: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HOME", "HF_OTHER", "ALONE", "NOT_ASKED_FOR"):
        monkeypatch.setenv(name, "the driver's")
    monkeypatch.setenv("RANK", "17")
    env = {"HF_OTHER": "the user's"}
    how = {"forward_env": ["HF_*", "ALONE", "RANK"], "env": env, "timeout": 120}

    @distributed(gpus=1, use_gpu=False, remote=remote, **how)
    def look() -> dict[str, str | None]:
        names = ("HF_HOME", "HF_OTHER", "ALONE", "RANK")
        return {name: os.environ.get(name) for name in names}

    expected = {"HF_HOME": "the driver's", "HF_OTHER": "the user's", "ALONE": "the driver's"}
    assert look.distributed() == [{**expected, "RANK": "0"}]


@pytest.mark.spark
def test_sparks_ui_describes_the_job(spark: Any) -> None:
    def train_fn() -> None:
        pass

    distributed(gpus=2, use_gpu=False, remote=True)(train_fn).distributed()

    jobs = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    descriptions = [jobs.apply(index).description() for index in range(jobs.size())]
    assert "train_fn on 2 ranks" in [each.get() for each in descriptions if each.isDefined()]
    assert spark.sparkContext.getLocalProperty("spark.job.description") is None


def test_several_runs_are_active_at_once(remote: bool, tmp_path: Path) -> None:
    """Each run waits until the other is there."""

    @distributed(gpus=1, use_gpu=False, remote=remote, timeout=120)
    def wait_for_other(me: str, other: str) -> str:
        (tmp_path / me).touch()
        until(lambda: (tmp_path / other).exists(), "the other run has started", 60)
        return me

    futures = [
        wait_for_other.distributed_async("a", "b"),
        wait_for_other.distributed_async("b", "a"),
    ]
    done, _ = concurrent.futures.wait(futures, timeout=120)

    assert done == set(futures)
    assert [future.result() for future in futures] == [["a"], ["b"]]


def test_a_future_raises_the_error_of_the_run(remote: bool) -> None:
    def fail() -> None:
        raise KeyError("on purpose")

    runner = distributed(gpus=2, use_gpu=False, remote=remote, timeout=120, run_async=True)
    future = runner(fail).distributed()

    with pytest.raises(KeyError, match="on purpose"):
        future.result(timeout=120)
    assert not future.cancel()
    assert not future.cancelled()


def test_a_cancelled_run_leaves_no_rank(remote: bool, tmp_path: Path) -> None:
    @distributed(gpus=2, use_gpu=False, remote=remote, timeout=120)
    def stay() -> None:
        (tmp_path / f"{os.getpid()}.pid").touch()
        threading.Event().wait()

    future = stay.distributed_async()
    until(lambda: len(list(tmp_path.iterdir())) == 2, "both ranks are there", 60)
    assert future.running()

    assert future.cancel()
    assert future.cancelled()
    assert not future.running()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    assert_gone(int(path.stem) for path in tmp_path.iterdir())


def test_a_run_can_be_cancelled_before_it_has_started(remote: bool) -> None:
    fn = distributed(gpus=2, use_gpu=False, remote=remote)(lambda: threading.Event().wait())

    assert fn.distributed_async().cancel()
    assert distributed(gpus=1, use_gpu=False, remote=remote)(who).distributed()


@pytest.mark.slow
@pytest.mark.spark
def test_cancelling_at_any_moment_leaves_the_executors(spark: Any) -> None:
    """A Python worker that waits in a Spark barrier would end its executor when it is cancelled."""
    executors = executors_of(spark)
    stay = distributed(gpus=2, use_gpu=False, remote=True)(lambda: threading.Event().wait())
    begin = distributed(gpus=2, use_gpu=False, remote=True, timeout=120)(who)

    for cancelled in range(30):
        future = stay.distributed_async()
        threading.Event().wait(cancelled % 10 / 20)
        assert future.cancel()
        assert len(begin.distributed()) == 2

    assert executors_of(spark) == executors


def executors_of(spark: Any) -> set[str]:
    """Return Spark's executors, each as the address of its block manager."""
    status = spark.sparkContext._jsc.sc().getExecutorMemoryStatus()
    return set(spark._jvm.scala.jdk.javaapi.CollectionConverters.asJava(status).keySet())


def test_the_names_of_the_other_package() -> None:
    assert serverless_gpu.distributed is launcher.distributed is distributed
    assert isinstance(distributed(who), launcher.DistributedFunction)
    assert compute.GPUType is air_compute.GPUType is GPUType
    ours = {name for name in dir(runtime) if name.startswith("get_")}
    assert set(their_runtime.__all__) == ours
    assert {getattr(their_runtime, name) for name in ours} == {
        getattr(runtime, name) for name in ours
    }


def test_functions_of_the_runtime_outside_a_run() -> None:
    numbers = [name for name in their_runtime.__all__ if name != "get_node_ip"]
    values = {name: getattr(runtime, name)() for name in numbers}
    ones = {"get_world_size": 1, "get_local_world_size": 1}
    assert values == {**dict.fromkeys(values, 0), **ones}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("GPU_8xH100", (8, "H100")),
        ("gpu_1xa10", (1, "a10")),
        ("H100", (None, "H100")),
        (GPUType.A10, (None, GPUType.A10)),
        (None, (None, None)),
    ],
)
def test_an_accelerator_type_may_include_a_number(wanted: object, found: object) -> None:
    assert split_accelerator(wanted) == found


@pytest.mark.parametrize(
    ("name", "gpu_type", "alike"),
    [
        ("NVIDIA A10", "A10", True),
        ("NVIDIA A10G", "A10", True),
        ("NVIDIA A100-SXM4-80GB", "A10", False),
        ("NVIDIA A100-SXM4-80GB", "A100", True),
        ("NVIDIA H100 80GB HBM3", "H100", True),
        ("NVIDIA H200", "H100", False),
        ("Tesla T4", "T4", True),
        ("NVIDIA L40S", "L4", False),
    ],
)
def test_types_of_gpus(name: str, gpu_type: str, alike: bool) -> None:
    assert is_of_type(name, gpu_type) == alike


def test_gpus_are_described() -> None:
    assert describe([]) == "no GPU"
    assert describe(["NVIDIA A10", "NVIDIA A10"]) == "2 x NVIDIA A10"


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"gpus": 0, "use_gpu": False}, ValueError, "positive integer, but is 0"),
        ({"gpus": 2.5, "use_gpu": False}, TypeError, "positive integer, but is 2.5"),
        ({"gpus": 2, "gpu_type": "Z80", "use_gpu": False}, ValueError, "T4, V100, A10.*'Z80'"),
        ({"use_gpu": False}, ValueError, "num_accelerators, the number of ranks, is missing"),
        ({"remote": True, "gpu_type": "A10"}, ValueError, "gpus, the number of ranks, is missing"),
        ({"gpus": 2, "use_gpu": False, "timeout": -1}, ValueError, "timeout must be a positive"),
        ({"gpus": 2, "use_gpu": False, "timeout": "1"}, TypeError, "timeout must be a positive"),
        ({"gpus": 1, "use_gpu": False, "pool": ""}, ValueError, "pool must be the name"),
        ({"num_accelerators": 0, "use_gpu": False}, ValueError, "num_accelerators has to be a"),
        ({"num_accelerators": 2, "accelerator_type": "Z"}, ValueError, "accelerator_type must be"),
        ({"accelerator_type": "H100", "remote": True}, ValueError, "num_accelerators, the number"),
        ({"gpus": 1, "remote": "False"}, TypeError, "remote must be True or False, but is 'False'"),
        ({"gpus": 1, "run_async": "no"}, TypeError, "run_async must be True or False"),
    ],
)
def test_bad_input_is_an_error_before_anything_is_launched(
    arguments: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        distributed(**arguments)(who).distributed()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"gpus": 2, "num_accelerators": 2}, "gpus and num_accelerators are two names"),
        ({"gpu_type": "A10", "accelerator_type": "A10"}, "gpu_type and accelerator_type are two"),
        (
            {"gpus": 2, "num_gpus": 3},
            r"@distributed got an unexpected keyword argument 'num_gpus'\. Did you mean 'gpus'",
        ),
    ],
)
def test_contradicting_arguments_are_an_error_at_once(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        distributed(**arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"gpus": 3}, "gpus is 3, but this machine has 2"),
        ({"num_accelerators": 3}, "num_accelerators is 3, but this machine has 2"),
        ({"accelerator_type": "GPU_8xH100"}, "in accelerator_type='GPU_8xH100' is 8, but this"),
    ],
)
def test_more_gpus_than_there_are(
    arguments: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ValueError, match=says):
        distributed(**arguments)(who).distributed()


def test_what_has_no_effect_has_the_name_that_was_passed(
    warned: Callable[[], list[str]],
) -> None:
    warn_once.cache_clear()
    distributed(gpus=1, accelerator_type="A10", use_gpu=False, timeout=120)(who).distributed()
    assert warned() == ["accelerator_type has no effect: the ranks have no GPUs."]


@pytest.mark.parametrize("function", [distributed, ray_launch])
def test_without_gpus_nothing_of_another_api_is_proposed(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RuntimeError, match=r"For CPUs pass use_gpu=False\.$"):
        function(who).distributed()


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"num_accelerators": 0, "use_gpu": False}, exceptions.GPUValidationError),
        ({"num_accelerators": "2", "use_gpu": False}, exceptions.GPUValidationError),
        ({"num_accelerators": 3}, exceptions.GPUValidationError),
        ({"accelerator_type": "GPU_9xZ80", "use_gpu": False}, exceptions.GPUTypeError),
        ({"accelerator_type": "GPU_2xH100"}, exceptions.GPUTypeError),
        ({"gpus": 2, "num_accelerators": 2}, exceptions.RuntimeConfigurationError),
        ({"gpus": 2, "use_gpu": False, "timeout": 0}, exceptions.RuntimeConfigurationError),
    ],
)
def test_errors_are_also_those_of_the_original(
    arguments: dict[str, Any], kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(kind) as caught:
        distributed(**arguments)(who).distributed()
    assert isinstance(caught.value, exceptions.ServerlessGpuCustomerError)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_run_that_takes_too_long_is_an_error_of_both(in_background: bool) -> None:
    wait = distributed(1, None, False, 3, use_gpu=False)(lambda: threading.Event().wait())

    with pytest.raises(exceptions.LocalExecutionTimeoutError) as caught:
        wait.distributed_async().result() if in_background else wait.distributed()
    assert isinstance(caught.value, RunTimeout)
    assert caught.value.stacks.keys() == {0}
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is exceptions.LocalExecutionTimeoutError


def test_arguments_of_the_decorator_are_replaced_for_some_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serverless.Session, "active", classmethod(lambda cls: None))

    @distributed(2, "GPU_8xH100", use_gpu=False, timeout=120)
    def train(lr: float) -> tuple[float, int]:
        return lr, runtime.get_world_size()

    larger = train.with_overrides(3, timeout=None)
    assert larger.distributed(0.1) == [(0.1, 3)] * 3
    assert larger(0.1) == larger.func(0.1) == (0.1, 1)
    assert train.distributed(lr=0.2) == [(0.2, 2)] * 2
    assert (larger.num_accelerators, larger.accelerator_type) == (3, AcceleratorType.GPU_8xH100)
    with pytest.raises(RuntimeError, match="runs on the active Spark session, and there is none"):
        train.with_overrides(remote=True).distributed(0.1)
    with pytest.raises(TypeError, match="gpus and num_accelerators are two names"):
        train.with_overrides(2, gpus=2)
    with pytest.raises(ValueError, match="gpus has to be a positive integer, but is 0"):
        train.with_overrides(gpus=0).distributed(0.1)


@pytest.mark.parametrize(
    ("arguments", "number", "kind"),
    [
        ({}, None, None),
        ({"gpus": 2, "gpu_type": "h100"}, 2, AcceleratorType.GPU_8xH100),
        ({"gpus": 1, "gpu_type": GPUType.H100}, 1, AcceleratorType.GPU_1xH100),
        ({"gpus": 4, "gpu_type": "A10"}, 4, AcceleratorType.GPU_1xA10),
        ({"accelerator_type": "gpu_8xb300"}, 8, AcceleratorType.GPU_8xB300),
        ({"accelerator_type": AcceleratorType.GPU_1xA10}, 1, AcceleratorType.GPU_1xA10),
        ({"accelerator_type": "GPU_4xT4"}, 4, "GPU_4xT4"),
        ({"gpus": 2, "gpu_type": "T4"}, 2, "T4"),
    ],
)
def test_a_decorated_function_says_what_it_runs_on(
    arguments: dict[str, Any], number: int | None, kind: object
) -> None:
    fn = distributed(**arguments)(who)
    assert (fn.num_accelerators, fn.accelerator_type) == (number, kind)
    assert type(fn.accelerator_type) is type(kind)


def test_types_of_nodes() -> None:
    assert AcceleratorType.values() == ["GPU_1xA10", "GPU_1xH100", "GPU_8xH100", "GPU_8xB300"]
    assert AcceleratorType("gpu_8XH100").gpu_type is GPUType("h100_80gb") is GPUType.H100
    assert [each.gpus_per_node for each in AcceleratorType] == [1, 1, 8, 8]
    assert GPUType("a10g") is GPUType.A10
    for wrong in (AcceleratorType, GPUType):
        with pytest.raises(exceptions.GPUTypeError, match=f"'Z80' is not a {wrong.__name__}"):
            wrong("Z80")
    with pytest.raises(exceptions.GPUTypeError, match="has GPUs of type T4"):
        AcceleratorType.from_gpu_type(GPUType.T4, 1)


def test_a_rank_knows_the_address_of_its_node(remote: bool) -> None:
    fn = distributed(1, None, remote, 120, use_gpu=False)(runtime.get_node_ip)

    [address] = fn.distributed()
    assert ipaddress.ip_address(address)
    ipaddress.ip_address(runtime.get_node_ip())


def test_a_captured_lock_is_named() -> None:
    lock = threading.Lock()
    fn = distributed(gpus=2, use_gpu=False)(lambda: lock.acquire())

    with pytest.raises(UnpicklableError, match="lock"):
        fn.distributed()
    with pytest.raises(exceptions.SerializationError, match="lock"):
        fn.distributed_async()


WITHOUT_SPARK = """
import json
from distributor import distributed

def error_of(**arguments):
    try:
        distributed(**arguments)(lambda: "fine").distributed()
    except Exception as error:
        return [type(error).__name__, str(error)]

print("FACTS " + json.dumps({
    "remote": error_of(gpus=2, remote=True, use_gpu=False),
    "none": error_of(),
    "too many": error_of(gpus=3),
    "wrong": error_of(num_accelerators=2, accelerator_type="gpu_2xh100"),
    "right": error_of(gpu_type="a10"),
}))
"""


def test_the_error_for_missing_gpus_names_those_that_exist(
    run_driver: RunDriver, nvml: Callable[..., str]
) -> None:
    without_mask = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    facts = facts_in(run_driver(WITHOUT_SPARK, env={**without_mask, "LD_LIBRARY_PATH": nvml(2)}))

    assert facts["remote"][0] == "RuntimeError"
    assert "SparkSession.builder.getOrCreate()" in facts["remote"][1]
    assert facts["none"] is None, "all GPUs of this machine"
    assert facts["too many"] == [
        "GPUValidationError",
        "gpus is 3, but this machine has 2. Request fewer, or use the GPUs of the Spark cluster "
        "with remote=True.",
    ]
    assert facts["wrong"] == [
        "GPUTypeError",
        "On this machine the run needs 2 GPUs of type H100, and there is 2 x NVIDIA A10G.",
    ]
    assert facts["right"] is None


COMPETING = """
import json, pathlib, sys, time
from pyspark.sql import SparkSession
from distributor import distributed

folder = pathlib.Path(sys.argv[1])
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.scheduler.mode", "FAIR")
    .config("spark.scheduler.allocation.file", sys.argv[2])
    .getOrCreate()
)

def until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)

def waiting():
    tracker = spark.sparkContext.statusTracker()
    return len(tracker.getActiveJobsIds())

def train(name, until_there):
    with (folder / "order").open("a") as file:
        file.write(name + " ")
    deadline = time.monotonic() + 120
    while until_there and not (folder / until_there).exists() and time.monotonic() < deadline:
        time.sleep(0.02)

def run(pool, *args):
    fn = distributed(gpus=2, use_gpu=False, remote=True, pool=pool)(train)
    return fn.distributed_async(*args)

first = run("on-demand", "first", "go")
until(lambda: (folder / "order").exists() and (folder / "order").read_text().count("first") == 2)
second = run("on-demand", "second", "")
until(lambda: waiting() == 2)
third = run("reserved", "third", "")
until(lambda: waiting() == 3)
(folder / "go").touch()
for future in (first, second, third):
    future.result(timeout=120)
pool = spark.sparkContext.getLocalProperty("spark.scheduler.pool")
print("FACTS " + json.dumps({"order": (folder / "order").read_text().split(), "pool": pool}))
"""


@pytest.mark.slow
@pytest.mark.spark
@needs_java
def test_the_reserved_pool_goes_first(run_driver: RunDriver, tmp_path: Path) -> None:
    facts = facts_in(run_driver(COMPETING, str(tmp_path), POOLS_FILE.as_uri()))

    assert facts["order"] == ["first"] * 2 + ["third"] * 2 + ["second"] * 2
    assert facts["pool"] is None, "the caller's thread is left as it was"


@pytest.mark.spark
@pytest.mark.parametrize(
    ("variables", "warns"),
    [({}, False), ({"DATABRICKS_USE_RESERVED_GPU_POOL": "False"}, True)],
    ids=["unset", "set"],
)
def test_a_reserved_pool_is_ignored_if_spark_has_no_pools(
    spark: Any,
    warned: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    warns: bool,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    found = distributed(gpus=1, use_gpu=False, remote=True, timeout=120)(who).distributed()

    assert found == [(0, 0, 0, 1, {})]
    assert any("spark.scheduler.mode" in text for text in warned()) == warns


@pytest.mark.spark
def test_a_requested_pool_is_an_error_if_spark_has_no_pools(spark: Any) -> None:
    fn = distributed(gpus=1, use_gpu=False, remote=True, pool="reserved")(who)

    with pytest.raises(RuntimeError, match=r"pool is 'reserved', but 'spark\.scheduler\.mode'"):
        fn.distributed()


@pytest.mark.spark
@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        ({"DISTRIBUTOR_POOL": "etl"}, RuntimeError, "variable DISTRIBUTOR_POOL is 'etl', but 'sp"),
        ({"DATABRICKS_USE_RESERVED_GPU_POOL": "maybe"}, ValueError, "POOL must be .* is 'maybe'"),
    ],
)
def test_a_variable_without_such_a_pool_is_named(
    spark: Any,
    monkeypatch: pytest.MonkeyPatch,
    value: dict[str, str],
    kind: type[Exception],
    says: str,
) -> None:
    for name, text in value.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(kind, match=says):
        distributed(gpus=1, use_gpu=False, remote=True)(who).distributed()


@pytest.mark.parametrize(
    ("variables", "pool"),
    [
        ({}, None),
        ({"DATABRICKS_USE_RESERVED_GPU_POOL": ""}, None),
        ({"DATABRICKS_USE_RESERVED_GPU_POOL": "True"}, "reserved"),
        ({"DATABRICKS_USE_RESERVED_GPU_POOL": "False"}, "on-demand"),
        ({"DATABRICKS_USE_RESERVED_GPU_POOL": "0", "DISTRIBUTOR_POOL": "mine"}, "mine"),
        ({"DATABRICKS_USE_RESERVED_GPU_POOL": "0", "DATABRICKS_REMOTE_GPU_POOL_ID": "id"}, "id"),
    ],
)
def test_variables_name_a_pool(
    variables: dict[str, str], pool: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serverless.Session, "active", classmethod(lambda cls: None))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert serverless._pool() == pool
