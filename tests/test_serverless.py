"""``@distributed``: number and place of the ranks, their values, and cancellation."""

from __future__ import annotations

import concurrent.futures
import os
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.waiting import assert_gone, until

from distributor import (
    RunTimeout,
    distributed,
    runtime,
    serverless,
    serverless_gpu,
)
from distributor.air import compute as air_compute
from distributor.air import exceptions
from distributor.core.gpus import AcceleratorType, GPUType, is_of_type
from distributor.serverless_gpu import compute, launcher
from distributor.serverless_gpu import runtime as their_runtime

cloudpickle.register_pickle_by_value(sys.modules[__name__])


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


def test_every_ranks_result_comes_in_the_order_of_ranks(remote: bool) -> None:
    fn = distributed(gpus=3, use_gpu=False, remote=remote, timeout=120)(who)

    found = fn.distributed("a", named=1)
    assert [each[0] for each in found] == [0, 1, 2]
    assert [each[3:] for each in found] == [(3, "a", {"named": 1})] * 3
    places = [(0, node) for node in range(3)] if remote else [(rank, 0) for rank in range(3)]
    assert sorted(each[1:3] for each in found) == places, "each task is a node"


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

    @staticmethod
    @distributed(gpus=1, use_gpu=False, timeout=120)
    def triple(x: int) -> int:
        return 3 * x

    @distributed(gpus=1, use_gpu=False, timeout=120)
    def start_another_run(self) -> Any:
        return self.fit.distributed(1)


def test_methods_get_their_instance_or_class() -> None:
    assert Model(3).fit(2) == (0, 6)
    assert Model(3).fit.distributed(2) == [(0, 6), (1, 6)]
    assert Model.fit.__doc__ == "Scale x."
    assert Model.name_kind.distributed("!") == ["linear!"] * 2
    assert Model(1).name_kind("?") == "linear?"
    assert Model(1).triple.distributed(2) == [6]


def test_settings_are_not_pickled_with_a_decorated_function() -> None:
    pickled = cloudpickle.dumps(Model(3))

    assert b"API_KEY" not in pickled
    assert b"a secret of the launcher" not in pickled
    with pytest.raises(RuntimeError, match="fit was pickled, and the settings of its runs were"):
        Model(3).start_another_run.distributed()


def test_variables_are_forwarded_by_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HOME", "HF_OTHER", "ALONE", "NOT_ASKED_FOR"):
        monkeypatch.setenv(name, "the driver's")
    monkeypatch.setenv("RANK", "17")
    env = {"HF_OTHER": "the user's"}
    how = {"forward_env": ["HF_*", "ALONE", "RANK"], "env": env, "timeout": 120}

    @distributed(gpus=1, use_gpu=False, **how)
    def look() -> dict[str, str | None]:
        names = ("HF_HOME", "HF_OTHER", "ALONE", "RANK")
        return {name: os.environ.get(name) for name in names}

    expected = {"HF_HOME": "the driver's", "HF_OTHER": "the user's", "ALONE": "the driver's"}
    assert look.distributed() == [{**expected, "RANK": "0"}]


def test_runs_overlap_and_their_futures_have_values_or_errors(tmp_path: Path) -> None:
    """Each run waits until the other is there."""

    @distributed(gpus=1, use_gpu=False, timeout=120, run_async=True)
    def wait_for_other(me: str, other: str) -> str:
        (tmp_path / me).touch()
        until(lambda: (tmp_path / other).exists(), "the other run has started", 60)
        if me == "b":
            raise KeyError("on purpose")
        return me

    one, other = wait_for_other.distributed("a", "b"), wait_for_other.distributed("b", "a")
    assert one.result(timeout=120) == ["a"]
    with pytest.raises(KeyError, match="on purpose"):
        other.result(timeout=120)
    assert not other.cancel()
    assert not other.cancelled()


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


@pytest.mark.slow
@pytest.mark.spark
def test_cancelling_at_any_moment_leaves_the_executors(spark: Any) -> None:
    """A Python worker that waits in a Spark barrier would end its executor when it is cancelled."""
    executors = executors_of(spark)
    stay = distributed(gpus=2, use_gpu=False, remote=True)(lambda: threading.Event().wait())
    begin = distributed(gpus=2, use_gpu=False, remote=True, timeout=120)(who)

    for moment in range(10):
        future = stay.distributed_async()
        threading.Event().wait(moment / 20)
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


@pytest.mark.parametrize(
    ("name", "gpu_type", "alike"),
    [
        ("NVIDIA A10", "A10", True),
        ("NVIDIA A10G", "A10", True),
        ("NVIDIA A100-SXM4-80GB", "A10", False),
        ("NVIDIA H100 80GB HBM3", "H100", True),
        ("NVIDIA L40S", "L4", False),
    ],
)
def test_types_of_gpus(name: str, gpu_type: str, alike: bool) -> None:
    assert is_of_type(name, gpu_type) == alike


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"gpus": 2.5, "use_gpu": False}, TypeError, "positive integer, but is 2.5"),
        ({"gpus": 2, "gpu_type": "Z80", "use_gpu": False}, ValueError, "T4, V100, A10.*'Z80'"),
        ({"use_gpu": False}, ValueError, "num_accelerators, the number of ranks, is missing"),
        ({"gpus": 1, "use_gpu": False, "pool": ""}, ValueError, "pool must be the name"),
        ({"gpus": 1, "remote": "False"}, TypeError, "remote must be True or False, but is 'False'"),
        (
            {"gpus": 2, "num_accelerators": 2},
            exceptions.RuntimeConfigurationError,
            "gpus and num_accelerators are two names",
        ),
        ({"gpus": 2, "num_gpus": 3}, TypeError, r"argument 'num_gpus'\. Did you mean 'gpus'"),
        ({"num_accelerators": 0, "use_gpu": False}, exceptions.GPUValidationError, "has to be a"),
        ({"accelerator_type": "GPU_9xZ80"}, exceptions.GPUTypeError, "accelerator_type must be"),
    ],
)
def test_bad_input_is_an_error_before_anything_is_launched(
    arguments: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        distributed(**arguments)(who).distributed()


def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ValueError, match="in accelerator_type='GPU_8xH100' is 8, but this"):
        distributed(accelerator_type="GPU_8xH100")(who).distributed()


def test_a_run_that_takes_too_long_is_an_error_of_both() -> None:
    wait = distributed(1, None, False, 1, use_gpu=False)(lambda: threading.Event().wait())

    with pytest.raises(exceptions.LocalExecutionTimeoutError) as caught:
        wait.distributed_async().result()
    assert isinstance(caught.value, RunTimeout)
    assert caught.value.stacks.keys() == {0}
    assert type(pickle.loads(pickle.dumps(caught.value))) is type(caught.value)


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
        ({"accelerator_type": "gpu_8xb300"}, 8, AcceleratorType.GPU_8xB300),
        ({"accelerator_type": AcceleratorType.GPU_1xA10}, 1, AcceleratorType.GPU_1xA10),
        ({"gpus": 2, "gpu_type": "T4"}, 2, "T4"),
    ],
)
def test_a_decorated_function_says_what_it_runs_on(
    arguments: dict[str, Any], number: int | None, kind: object
) -> None:
    fn = distributed(**arguments)(who)
    assert (fn.num_accelerators, fn.accelerator_type) == (number, kind)
    assert type(fn.accelerator_type) is type(kind)


@pytest.mark.spark
def test_a_pool_that_spark_does_not_have_is_an_error(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match=r"pool is 'reserved', but 'spark\.scheduler\.mode'"):
        distributed(gpus=1, use_gpu=False, remote=True, pool="reserved")(who).distributed()
    monkeypatch.setenv("DISTRIBUTOR_POOL", "etl")
    with pytest.raises(RuntimeError, match="variable DISTRIBUTOR_POOL is 'etl', but 'spark"):
        distributed(gpus=1, use_gpu=False, remote=True)(who).distributed()


@pytest.mark.parametrize(
    ("variables", "pool"),
    [
        ({}, None),
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
