"""What Spark's own tests hold of its two classes, held here of ours on the same session."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.ranks import Distribute

from distributor import DeepspeedTorchDistributor, TorchDistributor, WorkerDied
from distributor.rank.context import worker_context

cloudpickle.register_pickle_by_value(sys.modules[__name__])

CLASSES = ("TorchDistributor", "DeepspeedTorchDistributor")
OURS: dict[str, Any] = {"TorchDistributor": TorchDistributor}
OURS["DeepspeedTorchDistributor"] = DeepspeedTorchDistributor
TASK_GPUS = "spark.task.resource.gpu.amount"
pytestmark = pytest.mark.usefixtures("restored_loggers")
both_classes = pytest.mark.parametrize("name", CLASSES)


def pysparks(name: str) -> Any:
    """Return PySpark's class of that name."""
    from pyspark.ml.deepspeed import deepspeed_distributor

    return getattr(deepspeed_distributor, name)  # that module imports the other class


def checks_multiples() -> bool:
    """Return whether PySpark's class refuses a number of ranks that its tasks cannot have."""
    module = sys.modules[pysparks("TorchDistributor").__module__]
    return "must be a multiple" in inspect.getsource(module)  # not in 4.0


@pytest.fixture
def conf(spark: Any) -> Iterator[Any]:
    """Return the session's configuration, which is restored."""
    yield spark.conf
    spark.conf.unset(TASK_GPUS)


# Signatures and attributes


@both_classes
@pytest.mark.parametrize("method", ["__init__", "run"])
def test_the_signature_begins_as_pysparks(name: str, method: str) -> None:
    def parameters(kind: Any) -> list[tuple[str, Any, Any]]:
        found = inspect.signature(getattr(kind, method)).parameters.values()
        return [(each.name, each.kind, each.default) for each in found if each.name[0] != "_"]

    theirs, ours = parameters(pysparks(name)), parameters(OURS[name])
    assert len(theirs) > 1
    assert ours[: len(theirs)] == theirs
    further = {kind for _, kind, _ in ours[len(theirs) :]}
    assert further <= {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}


@pytest.mark.spark
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("TorchDistributor", (100, True, False)),
        ("TorchDistributor", (100, False, False)),
        ("DeepspeedTorchDistributor", (4, 3, True, False, {"train_batch_size": 8})),
        ("DeepspeedTorchDistributor", (True, 1, False, False, "")),
    ],
)
def test_attributes(spark: Any, name: str, arguments: tuple[Any, ...]) -> None:
    ours, theirs = OURS[name](*arguments), pysparks(name)(*arguments)
    assert ours.input_params == theirs.input_params
    for attribute in theirs.input_params:
        assert getattr(ours, attribute) == getattr(theirs, attribute)
    assert ours.logger is theirs.logger
    assert ours.spark.sparkContext is spark.sparkContext
    ours.input_params["num_processes"] = 7
    assert ours.input_params == theirs.input_params, "a new dict each time"


# Checks


@pytest.mark.spark
@pytest.mark.parametrize(
    ("name", "arguments", "amount", "message"),
    [
        ("TorchDistributor", (0, True, False), None, "has to be a positive integer"),
        ("TorchDistributor", (1, True, True), None, "unable to be found on the driver"),
        ("TorchDistributor", (4, False, True), None, f"^'{TASK_GPUS}' was unset"),
        ("TorchDistributor", (8, False, True), "3", rf"\(8\) must be a multiple of '{TASK_GPUS}'"),
        ("DeepspeedTorchDistributor", (1, 0, True, False), None, "has to be a positive integer"),
        ("DeepspeedTorchDistributor", (4, 2, False), "3", r"\(8\) must be a multiple"),
    ],
)
def test_what_pyspark_refuses(
    conf: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    arguments: tuple[Any, ...],
    amount: str | None,
    message: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # this machine may have GPUs
    if amount:
        conf.set(TASK_GPUS, amount)
    if amount and not checks_multiples():
        with pytest.raises(RuntimeError, match=message):
            OURS[name](*arguments)
        return
    with pytest.raises(Exception, match=message) as theirs:
        pysparks(name)(*arguments)
    with pytest.raises(theirs.type, match=message) as ours:
        OURS[name](*arguments)
    if name == "TorchDistributor":
        text = re.sub("proc+esses", "processes", str(theirs.value))  # misspelled in PySpark 3.5
        assert str(ours.value).startswith(text.rstrip("."))
    else:
        assert not re.search("num_processes|use_gpu|local_mode", str(ours.value))


BAD_DEEPSPEED_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"numGpus": 2.5}, TypeError, "numGpus has to be a positive integer, but is 2.5 of type float"),
    ({"localMode": "False"}, TypeError, "localMode must be True or False, but is 'False'"),
    ({"num_processes": 2}, TypeError, "argument 'num_processes'. Did you mean 'numGpus'?"),
    ({"deepspeedConfig": 3}, TypeError, "deepspeedConfig must be a dict, the path of a JSON file"),
    ({"deepspeedConfig": {"dtype": int}}, TypeError, "deepspeedConfig cannot be written as JSON"),
    ({"deepspeedConfig": "~/absent.json"}, FileNotFoundError, "no file {home}/absent.json"),
    ({"deepspeedConfig": "~/text.json"}, ValueError, "{home}/text.json is not JSON"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD_DEEPSPEED_ARGUMENTS)
def test_bad_arguments_for_deepspeed(
    arguments: dict[str, Any],
    kind: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "text.json").write_text('{"train_batch_size": 8')
    with pytest.raises(kind, match=re.escape(message.format(home=tmp_path))):
        DeepspeedTorchDistributor(**{"useGpu": False, **arguments})


@both_classes
def test_a_script_with_keyword_arguments(name: str) -> None:
    theirs = pysparks(name)
    with pytest.raises(ValueError, match="key") as expected:
        theirs._run_training_on_pytorch_file({}, "train.py", epochs=3)
    runner = TorchDistributor(use_gpu=False)
    if name == "DeepspeedTorchDistributor":
        runner = DeepspeedTorchDistributor(useGpu=False)
    run: Any = runner.run
    with pytest.raises(ValueError, match=r"Pass epochs as .*'--epochs=3'") as raised:
        run(__file__, epochs=3)
    assert str(raised.value).startswith(str(expected.value).rstrip("."))


# GPUs


@pytest.mark.spark
@both_classes
@pytest.mark.parametrize(("amount", "tasks"), [("1", 8), ("2", 4)])
def test_tasks_by_the_gpus_of_each(conf: Any, name: str, amount: str, tasks: int) -> None:
    """The amount may be set on the session: Spark's scheduler does not know it, and a run fails."""
    conf.set(TASK_GPUS, amount)
    arguments = (8, False, True) if name == "TorchDistributor" else (4, 2, False)
    ours = OURS[name](*arguments)
    assert ours.num_tasks == pysparks(name)(*arguments).num_tasks == tasks
    with pytest.raises(RuntimeError, match=f"'{TASK_GPUS}' was set after Spark's start"):
        ours.run(print, "not run")


def gpus_of_rank() -> tuple[str | None, bool]:
    """Return which GPUs this rank sees, and whether `distributor.train` uses them."""
    return os.environ.get("CUDA_VISIBLE_DEVICES"), worker_context().uses_gpus


def test_local_ranks_on_cpus_have_the_drivers_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    ranks = TorchDistributor(2, use_gpu=False, timeout=120)
    assert ranks.run_all(gpus_of_rank) == [("0,1,2", False)] * 2
    ranks = TorchDistributor(2, use_gpu=True, timeout=120)
    assert ranks.run_all(gpus_of_rank) == [("0,1", True)] * 2


# Runs


def test_a_function_with_arguments_returns_rank_0s_value(distribute: Distribute) -> None:
    """Through Spark, PySpark's class returns a value in parts of four kilobytes."""

    def train(*parts: str, times: int) -> str:
        return (os.environ["RANK"] + "".join(parts)) * times

    assert distribute(2).run(train, "suc", "cess", times=4096) == "0success" * 4096


def test_start_and_end_are_logged(distribute: Distribute, caplog: pytest.LogCaptureFixture) -> None:
    ranks = distribute(2)
    with caplog.at_level(logging.INFO, logger="TorchDistributor"):
        ranks.run(len, "abc")
    where = "local training with 2 processes"
    if not ranks.local_mode:
        where = "distributed training with 2 executor processes"
    logged = [each.getMessage() for each in caplog.records if each.name == "TorchDistributor"]
    started, finished = logged
    assert started == f"Started {where}"
    assert re.fullmatch(rf"Finished {where} in [\d.]+ s", finished)


# DeepSpeed's command line


@pytest.fixture(params=["local", pytest.param("cluster", marks=pytest.mark.spark(shared=True))])
def deepspeed(request: pytest.FixtureRequest) -> Callable[..., DeepspeedTorchDistributor]:
    """Make a distributor of two CPU ranks, once per launcher: ``deepspeed(config)``."""
    local_mode = request.param == "local"
    if not local_mode:
        request.getfixturevalue("spark")

    def make(config: Any = None) -> DeepspeedTorchDistributor:
        shape = (2, 1) if local_mode else (1, 2)
        return DeepspeedTorchDistributor(*shape, local_mode, False, config, timeout=120)

    return make


CONFIG = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}


def command_line() -> tuple[list[str], str | None]:
    """Return on a rank its arguments, and the content of the file that is named last, if any."""
    last = Path(sys.argv[-1])
    return sys.argv[1:], last.read_text() if last.is_file() else None


@pytest.mark.parametrize("kind", ["dict", "path", "none"])
def test_a_function_sees_deepspeeds_arguments(
    deepspeed: Callable[..., DeepspeedTorchDistributor],
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG, indent=1))
    configs = {"dict": CONFIG, "path": "~/config.json"}
    seen = deepspeed(configs.get(kind)).run_all(command_line)
    if kind == "none":
        assert seen == [(["--deepspeed"], None)] * 2
        return
    paths = [arguments[2] for arguments, _ in seen]
    for (arguments, content), path in zip(seen, paths, strict=True):
        assert arguments == ["--deepspeed", "--deepspeed_config", path]
        assert content is not None
        assert json.loads(content) == CONFIG
    assert paths[0] != paths[1], "each rank has a file of its own"
    assert not any(Path(path).exists() for path in paths)


SCRIPT = """
import json, os, sys
path = sys.argv[-1]
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as out:
    json.dump([sys.argv, path, open(path).read()], out)
"""


def test_a_script_sees_deepspeeds_arguments_after_its_own(
    deepspeed: Callable[..., DeepspeedTorchDistributor], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert deepspeed(CONFIG).run(str(script), tmp_path, 2, "5") is None
    for rank in "01":
        argv, path, config = json.loads((tmp_path / rank).read_text())
        own = [str(script), str(tmp_path), "2", "5"]
        assert argv == [*own, "--deepspeed", "--deepspeed_config", path]
        assert json.loads(config) == CONFIG
        assert not Path(path).exists()


def test_a_killed_rank_leaves_no_config(tmp_path: Path) -> None:
    def die() -> None:
        (tmp_path / "path").write_text(sys.argv[-1])
        os.kill(os.getpid(), 9)

    ranks = DeepspeedTorchDistributor(useGpu=False, deepspeedConfig=CONFIG, timeout=120)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        ranks.run(die)
    config = Path((tmp_path / "path").read_text())
    assert config.name.endswith(".json")
    assert not config.exists()
