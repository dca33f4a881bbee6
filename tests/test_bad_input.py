"""Bad input is one clear error, raised before a process is started or a Spark job submitted."""

from __future__ import annotations

import contextlib
import functools
import re
import socket
import sys
import tarfile
import threading
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from distributor import TorchDistributor, UnpicklableError, distributed
from distributor.screen.one_time_warnings import warn_once

FOLDER = Path(__file__).parent
NAN, INFINITY = float("nan"), float("inf")

_started: list[Any] = []
"""The command lines of the processes that this process has started, also of short-lived ones."""


def _note_process(event: str, args: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.posix_spawn", "os.fork"):
        _started.append(args)


sys.addaudithook(_note_process)


@pytest.fixture
def nothing_launched(
    request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context that asserts that no process, Spark job or output comes of its block."""
    spark = request.getfixturevalue("spark") if "spark" in request.fixturenames else None

    @contextlib.contextmanager
    def watch() -> Iterator[None]:
        _started.clear()
        capfd.readouterr()
        children, jobs = _children(), _spark_jobs(spark)
        yield
        assert (_started, _children() - children, _spark_jobs(spark)) == ([], set(), jobs)
        assert capfd.readouterr() == ("", "")

    return watch


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def _spark_jobs(spark: Any) -> int:
    """Return the number of all jobs that were submitted to a session."""
    if spark is None:
        return 0
    return int(spark.sparkContext._jsc.sc().dagScheduler().numTotalJobs())


def train(*args: object, **kwargs: object) -> str:
    return "launched"


def local(num_processes: Any = 1, **settings: Any) -> TorchDistributor:
    """Return a local distributor without a zygote, so that its construction starts no process."""
    settings = {"local_mode": True, "use_gpu": False, "warm": False, **settings}
    return TorchDistributor(num_processes, **settings)


BAD_SETTINGS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_processes": 0}, ValueError, "num_processes has to be a positive integer, but is 0"),
    ({"num_processes": -1}, ValueError, "num_processes .* but is -1"),
    ({"num_processes": 2.5}, TypeError, "num_processes .* but is 2.5 of type float"),
    ({"num_processes": "2"}, TypeError, "num_processes .* but is '2' of type str"),
    ({"num_processes": True}, TypeError, "num_processes .* but is True of type bool"),
    ({"num_processes": None}, TypeError, "num_processes .* but is None of type NoneType"),
    ({"num_processes": [4, 2]}, ValueError, r"num_processes .*but is \[4, 2\]: the minimum is"),
    ({"num_processes": (2, 3, 4)}, TypeError, r"\(minimum, maximum\), but is \(2, 3, 4\)"),
    ({"num_processes": (1, "2")}, TypeError, "num_processes .* but is '2' of type str"),
    ({"num_proceses": 2}, TypeError, "argument 'num_proceses'. Did you mean 'num_processes'?"),
    ({"num_workers": 2}, TypeError, "argument 'num_workers'. Did you mean 'num_processes'?"),
    (
        {"executor_resources": ["spark.executor.cores"]},
        TypeError,
        "executor_resources must be a mapping of Spark properties",
    ),
    (
        {"executor_resources": {"spark.executor.memry": "8g"}},
        ValueError,
        "executor_resources has 'spark.executor.memry', .* It takes spark.executor.cores, ",
    ),
    (
        {"executor_resources": {"spark.executor.cores": "some"}},
        ValueError,
        r"executor_resources\['spark.executor.cores'\] must be a positive integer",
    ),
    (
        {"executor_resources": {"spark.executor.memory": "much"}},
        ValueError,
        r"executor_resources\['spark.executor.memory'\] must be a size such as '8g'",
    ),
    (
        {"executor_resources": {"spark.task.resource.gpu.amount": 1}},
        ValueError,
        "it must have 'spark.executor.resource.gpu.amount', too",
    ),
    ({"colour": "red"}, TypeError, "argument 'colour'. It takes barrier, env, .*warm"),
    ({"local_mode": "False"}, TypeError, "local_mode must be True or False, but is 'False' of"),
    ({"use_gpu": "no"}, TypeError, "use_gpu must be True or False, but is 'no' of type str"),
    ({"use_gpu": 2}, TypeError, "use_gpu must be True or False, but is 2 of type int"),
    ({"warm": None}, TypeError, "warm must be True or False, but is None of type NoneType"),
    (
        {"env": {"A": 1}},
        TypeError,
        r"env must map strings to strings, but has 'A': 1 \(str to int\)",
    ),
    ({"env": {"A": None}}, TypeError, "env must map strings .* 'A': None"),
    ({"env": {1: "a"}}, TypeError, "env must map strings .* 1: 'a'"),
    ({"env": {"A=B": "c"}}, ValueError, "env has 'A=B', which is not a valid name"),
    ({"env": {"": "c"}}, ValueError, "env has '', which is not a valid name"),
    ({"env": {"A\0": "c"}}, ValueError, r"env has 'A\\x00', which is not a valid name"),
    ({"env": {"A": "b\0"}}, ValueError, "env has a NUL character in the value of A"),
    ({"env": {"RANK": "1"}}, ValueError, "env must not set RANK: the launcher sets it"),
    ({"env": {"MASTER_PORT": "1"}}, ValueError, "env must not set MASTER_PORT"),
    ({"env": None}, TypeError, "env must map strings to strings, but is None"),
    ({"env": ["A=B"]}, TypeError, r"env must map strings to strings, but is \['A=B'\]"),
    ({"preload": "torch"}, TypeError, r"preload must be a list of modules, .* but is 'torch'"),
    (
        {"forward_env": "HF_*"},
        TypeError,
        r"forward_env must be a list of variables, .* but is 'HF_\*'",
    ),
    ({"mlflow_ranks": "some"}, ValueError, "mlflow_ranks must be 'first' or 'all', but is 'some'"),
    ({"preload": [1]}, TypeError, r"preload must be a list of modules, .* but is \[1\]"),
    (
        {"timeout": 0},
        ValueError,
        "timeout must be a positive, .* number of seconds, or None, but is 0",
    ),
    ({"timeout": -1}, ValueError, "timeout must be a positive, .* but is -1"),
    ({"timeout": NAN}, ValueError, "timeout must be a positive, .* but is nan"),
    ({"timeout": INFINITY}, ValueError, "timeout must be a .*finite .*or None, but is inf"),
    ({"timeout": "x"}, TypeError, "timeout must be a .*number of seconds.* but is 'x'"),
    ({"timeout": True}, TypeError, "timeout must be a .*number of seconds.* but is True"),
    ({"stall_warning": 0}, ValueError, "stall_warning must be a positive, .* or None, but is 0"),
    ({"stall_timeout": "1"}, TypeError, "stall_timeout must be a positive, .* but is '1'"),
    ({"start_timeout": 0}, ValueError, "start_timeout must be a positive, .* but is 0"),
    ({"start_timeout": INFINITY}, ValueError, "start_timeout must be a .*finite .* but is inf"),
    (
        {"start_timeout": None},
        TypeError,
        "start_timeout must be a .*number of seconds, but is None",
    ),
    ({"show_output": "loud"}, ValueError, r"show_output must be 'all', 'none' or .* but is 'loud'"),
    ({"show_output": [-1]}, ValueError, r"show_output .* but is \[-1\]"),
    ({"show_output": ["0"]}, ValueError, r"show_output .* but is \['0'\]"),
    ({"show_output": 0}, ValueError, "show_output .* but is 0"),
    ({"hub_address": "host:abc"}, ValueError, "hub_address must be .* but is 'host:abc'"),
    ({"hub_address": "host:"}, ValueError, "hub_address must be .* but is 'host:'"),
    ({"hub_address": ":80"}, ValueError, "hub_address must be .* but is ':80'"),
    ({"hub_address": ""}, ValueError, "hub_address must be .* but is ''"),
    ({"hub_address": "host:65536"}, ValueError, "'host:65536', but the highest port is 65535"),
    ({"hub_address": "fd00::2"}, ValueError, r"IPv6 .*brackets.* but is 'fd00::2'"),
    ({"hub_address": "fd00::2:5000"}, ValueError, r"brackets, such as '\[fd00::2\]:5000'"),
    ({"hub_address": "[host]:80"}, ValueError, r"hub_address must be .* but is '\[host\]:80'"),
    ({"hub_address": "[fd00::2]:"}, ValueError, r"hub_address must be .* but is '\[fd00::2\]:'"),
    ({"hub_address": "[fd00::2"}, ValueError, r"hub_address must be .* but is '\[fd00::2'"),
    ({"hub_address": "[::1]:65536"}, ValueError, r"'\[::1\]:65536', but the highest port"),
    ({"hub_port": "80"}, TypeError, "hub_port is a port, or 0 for a free one, but is '80'"),
    ({"hub_port": -1}, ValueError, "hub_port is a port from 1 to 65535, .* not -1"),
    ({"hub_port": 65536}, ValueError, "hub_port is a port from 1 to 65535, .* not 65536"),
    ({"rank_ports": 29500}, TypeError, "rank_ports is a range .*'29500-29599', but is 29500"),
    ({"rank_ports": "many"}, ValueError, "rank_ports is a range .*, but is 'many'"),
    ({"rank_ports": "29500-"}, ValueError, "rank_ports is a range .*, but is '29500-'"),
    ({"rank_ports": "0-9"}, ValueError, "rank_ports .* port of 1 to 65535, but is '0-9'"),
    ({"rank_ports": "9-8"}, ValueError, "rank_ports .*from a lower to a higher .* is '9-8'"),
    ({"rank_ports": "1-65536"}, ValueError, "rank_ports .* 1 to 65535, but is '1-65536'"),
    ({"storage_path": 7}, TypeError, "storage_path must be a path or a URI, but is 7"),
    (
        {"name": "a/b", "storage_path": "x"},
        ValueError,
        "name must be the name of a folder, but is 'a/b'",
    ),
    ({"name": "a"}, ValueError, "name is 'a', but storage_path is not set"),
    ({"hub_address": 80}, TypeError, "hub_address must be .* but is 80"),
    ({"log_dir": 5}, TypeError, "log_dir must be the path of a folder, but is 5"),
    ({"log_dir": __file__}, NotADirectoryError, f"log_dir .* but '{re.escape(__file__)}'"),
    ({"log_dir": f"{__file__}/logs"}, NotADirectoryError, "log_dir .* or a parent of it is a file"),
    ({"environment": "no.tar.gz"}, FileNotFoundError, "no packed environment 'no.tar.gz' .looked"),
    ({"environment": FOLDER}, IsADirectoryError, f"'{FOLDER}' is a folder. Pack .*venv-pack"),
    ({"environment": __file__}, ValueError, "a packed environment ends in .tar.gz, .*as a list"),
    ({"environment": 3}, TypeError, "environment is the path of .*, or a list .* but is 3"),
    ({"environment": [3]}, TypeError, r"environment is .* but is \[3\]"),
    ({"environment": ["-r x.txt"]}, ValueError, "but has '-r x.txt'. Options are variables"),
    ({"environment": ["numpy", ""]}, ValueError, "environment lists requirements .* but has ''"),
]


@pytest.mark.parametrize(("settings", "kind", "message"), BAD_SETTINGS)
def test_an_invalid_setting(
    nothing_launched: Any, settings: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with nothing_launched(), pytest.raises(kind, match=message):
        local(**settings).run(train)


def test_settings_that_have_no_effect(warned: Callable[[], list[str]]) -> None:
    warn_once.cache_clear()
    for _ in range(2):
        local(pool="etl", hub_port=7391, gpu_type="A10", preload=["json"])
    assert warned() == [
        "pool and hub_port have no effect: the ranks run on this machine, without Spark.",
        "gpu_type has no effect: the ranks have no GPUs.",
        "preload has no effect: each rank starts a new interpreter (warm is off).",
    ]


def test_a_copy_has_no_settings_without_effect(warned: Callable[[], list[str]]) -> None:
    warn_once.cache_clear()
    replace(local(), num_processes=2)
    assert warned() == []


def test_settings_of_an_administrator_are_not_said_to_have_no_effect(
    warned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    warn_once.cache_clear()
    monkeypatch.setenv("DISTRIBUTOR_HUB_PORT", "7000")
    assert local().hub_port == 7000
    assert warned() == []


THIS, OTHER = f"{sys.version_info[0]}.{sys.version_info[1]}", "3.2"
ARCHIVES: dict[str, tuple[list[str], str]] = {
    "of another Python": (
        ["pyvenv.cfg", f"lib/python{OTHER}/os.py"],
        f"with Python {OTHER}, and this process runs Python {THIS}: .* Pack an environment with "
        f"Python {THIS}",
    ),
    "of something else": (["a", "b/c", f"d/e/lib/python{THIS}/f"], "there is no lib/pythonX.Y"),
    "of a folder above": ([f"venv/lib/python{THIS}/os.py"], "has lib and bin in a folder 'venv/'"),
    "empty": ([], "there is no lib/pythonX.Y"),
}


@pytest.mark.parametrize(("names", "message"), ARCHIVES.values(), ids=list(ARCHIVES))
@pytest.mark.parametrize("suffix", [".tar.gz", ".zip"])
def test_an_archive_that_is_not_an_environment(
    nothing_launched: Any, tmp_path: Path, names: list[str], message: str, suffix: str
) -> None:
    archive = tmp_path / f"environment{suffix}"
    if suffix == ".zip":
        with zipfile.ZipFile(archive, "w") as packed:
            for name in names:
                packed.writestr(name, "")
    else:
        with tarfile.open(archive, "w:gz") as packed_tar:
            for name in names:
                packed_tar.addfile(tarfile.TarInfo(name))
    with nothing_launched(), pytest.raises(ValueError, match=message) as caught:
        local(environment=archive).run(train)
    assert str(archive) in str(caught.value)


@pytest.mark.parametrize("suffix", [".tar.gz", ".tgz", ".tar", ".zip"])
@pytest.mark.parametrize("cut", ["no archive", "cut off"])
def test_an_archive_that_cannot_be_read(
    nothing_launched: Any, tmp_path: Path, suffix: str, cut: str
) -> None:
    archive = tmp_path / f"environment{suffix}"
    if cut == "cut off" and suffix.endswith("gz"):
        with tarfile.open(archive, "w:gz") as packed:
            packed.add(__file__, "first")
            packed.add(__file__, f"lib/python{THIS}/os.py")
        archive.write_bytes(archive.read_bytes()[:2000])
    else:
        archive.write_bytes(b"no archive")
    with nothing_launched(), pytest.raises(ValueError, match="cannot be read as an archive: "):
        local(environment=archive).run(train)


async def sleep() -> None: ...


def count() -> Iterator[int]:
    yield 1


async def count_slowly() -> AsyncIterator[int]:
    yield 1


class Sleeper:
    async def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("train_object", "kind", "message"),
    [
        (sleep, TypeError, "sleep is an async function: .* not run its body. .*asyncio.run"),
        (count, TypeError, "count is a generator: .* Return a list"),
        (count_slowly, TypeError, "count_slowly is an async generator"),
        (functools.partial(sleep), TypeError, "sleep is an async function"),
        (Sleeper(), TypeError, "is an async function"),
        (Sleeper().__call__, TypeError, "is an async function"),
        (
            3,
            TypeError,
            "run takes a callable or the path of a Python script, but got 3 of type int",
        ),
        (None, TypeError, "run takes .* but got None of type NoneType"),
        (b"train.py", TypeError, "run takes .* but got b'train.py' of type bytes"),
        ("no/such/train.py", FileNotFoundError, "no script no/such/train.py .looked in /"),
        (FOLDER / "missing.py", FileNotFoundError, "There is no script /.*missing.py"),
        (str(FOLDER), IsADirectoryError, f"{re.escape(str(FOLDER))} is a folder"),
        (FOLDER, IsADirectoryError, f"{re.escape(str(FOLDER))} is a folder"),
        ("", IsADirectoryError, "is a folder"),
    ],
)
def test_an_invalid_train_object(
    nothing_launched: Any, train_object: Any, kind: type[Exception], message: str
) -> None:
    with nothing_launched(), pytest.raises(kind, match=message):
        local().run(train_object)


def epochs_of(epochs: int, *, lr: float = 0.1) -> int:
    return epochs


@functools.wraps(epochs_of)
def of_three_epochs() -> int:
    return epochs_of(3)


def test_arguments_that_do_not_fit(nothing_launched: Any) -> None:
    runner: Any = local()
    says = r"epochs_of\(epochs.*\).* cannot be called like this: got an unexpected .* 'epoch'"
    with nothing_launched(), pytest.raises(TypeError, match=says):
        runner.run(epochs_of, 3, epoch=3)
    with nothing_launched(), pytest.raises(TypeError, match="missing a required argument"):
        runner.submit(epochs_of)


def test_a_decorator_may_add_arguments() -> None:
    assert local().run(of_three_epochs) == 3
    assert distributed(gpus=1, use_gpu=False)(of_three_epochs).distributed() == [3]


SCRIPTS = {
    "train.ipynb": (b'{"cells": []}', ValueError, "train.ipynb is a notebook. .* nbconvert"),
    "train.IPYNB": (b"", ValueError, "train.IPYNB is a notebook"),
    "notebook": (b'{"cells": [], "nbformat": 4}', ValueError, "notebook is a notebook"),
    "config.json": (b'{"lr": 1}', ValueError, "config.json is not a Python script"),
    "run": (b"#!/bin/sh\nexit\n", ValueError, "run is not a Python script"),
    "null.py": (b"x = 1\0", ValueError, "null.py is not a Python script"),
    "train.sh": (b"torchrun --nproc 2 train.py", ValueError, "train.sh is not a Python script"),
    "train.pyc": (b"\0\1\2", ValueError, "train.pyc is not a Python script"),
    "train.py": (b"def (:", SyntaxError, r"invalid syntax .*train.py, line 1"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_file_that_is_no_script(nothing_launched: Any, tmp_path: Path, name: str) -> None:
    source, kind, message = SCRIPTS[name]
    (tmp_path / name).write_bytes(source)
    with nothing_launched(), pytest.raises(kind, match=message):
        local().run(str(tmp_path / name))


def test_a_path_of_the_users_home(
    nothing_launched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "helpers.py").touch()
    with nothing_launched():
        settings = local(log_dir="~/logs", py_modules=["~/helpers.py"])
    assert settings.log_dir == str(tmp_path / "logs")
    assert settings.py_modules == [str(tmp_path / "helpers.py")]
    for call in (lambda: local(environment="~/no.tar.gz"), lambda: local().run("~/no.py")):
        with nothing_launched(), pytest.raises(FileNotFoundError, match=f"{tmp_path}/no."):
            call()


def test_a_script_given_keyword_arguments(nothing_launched: Any) -> None:
    runner: Any = local()
    with nothing_launched(), pytest.raises(ValueError, match="Pass epochs, lr as") as caught:
        runner.run(__file__, lr=0.1, epochs=3)
    assert "run('train.py', '--epochs=3')" in str(caught.value)


def closure(culprit: object) -> Callable[[], object]:
    guarded = culprit

    def train() -> object:
        return guarded

    return train


def helpers_closure(culprit: object) -> Callable[[], object]:
    helper = closure(culprit)

    def work() -> object:
        return helper()

    return work


def global_variable(culprit: object) -> Callable[[], object]:
    namespace: dict[str, Any] = {"guarded": culprit, "__name__": "a_notebook"}
    exec("def train():\n    return [guarded for _ in range(3)]", namespace)
    return namespace["train"]  # type: ignore[no-any-return]


def default_argument(culprit: object) -> Callable[..., object]:
    def train(first: int = 0, guarded: object = culprit) -> object:
        return guarded

    return train


def keyword_default(culprit: object) -> Callable[..., object]:
    def train(*, guarded: object = culprit) -> object:
        return guarded

    return train


class Trainer:
    """Holds an object that cannot be pickled in a nested attribute."""

    def __init__(self, culprit: object) -> None:
        self.guarded = {"inside": [culprit]}

    def train(self) -> None: ...

    def __call__(self) -> None: ...


Give = Callable[[Any], tuple[Any, ...]]
HIDING_PLACES: dict[str, tuple[str, Give, dict[str, Give]]] = {
    "closure": ("the variable 'guarded' used by train is a ", lambda it: (closure(it),), {}),
    "global": ("the variable 'guarded' used by train is a ", lambda it: (global_variable(it),), {}),
    "default": (
        "the variable 'guarded' used by train is a ",
        lambda it: (default_argument(it),),
        {},
    ),
    "keyword default": (
        "the variable 'guarded' used by train is a ",
        lambda it: (keyword_default(it),),
        {},
    ),
    "closure of a helper": (
        "'work' .* the variable 'guarded' used by the variable 'helper' used by work is a ",
        lambda it: (helpers_closure(it),),
        {},
    ),
    "bound method": (
        r"'train' .* train.__self__.guarded\['inside'\]\[0\] is a ",
        lambda it: (Trainer(it).train,),
        {},
    ),
    "callable object": (
        r"'Trainer' .* Trainer.guarded\['inside'\]\[0\] is a ",
        lambda it: (Trainer(it),),
        {},
    ),
    "function in partials": (
        "'train' .* the variable 'guarded' used by train is a ",
        lambda it: (functools.partial(functools.partial(closure(it))),),
        {},
    ),
    "argument in a partial": (
        r"'train' .* train's arguments\[0\] is a ",
        lambda it: (functools.partial(train, it),),
        {},
    ),
    "keyword in a partial": (
        r"'train' .* train's arguments\['guarded'\] is a ",
        lambda it: (functools.partial(train, guarded=it),),
        {},
    ),
    "inside an argument": (
        r"'train' .* argument 1\['guarded'\]\[1\] is a ",
        lambda it: (train, 0, {"guarded": [0, it]}),
        {},
    ),
    "attribute of an argument": (
        r"'train' .* argument 0.guarded\['inside'\]\[0\] is a ",
        lambda it: (train, Trainer(it)),
        {},
    ),
    "keyword argument": (
        "'train' .* argument 'guarded' is a ",
        lambda it: (train,),
        {"guarded": lambda it: it},
    ),
}
each_hiding_place = pytest.mark.parametrize(
    ("message", "call", "kwargs"), HIDING_PLACES.values(), ids=HIDING_PLACES
)


@each_hiding_place
def test_a_lock_cannot_be_sent(nothing_launched: Any, message: str, call: Any, kwargs: Any) -> None:
    lock = threading.Lock()
    given = {name: make(lock) for name, make in kwargs.items()}
    expected = f"{message}lock .*Create it inside the function"
    with nothing_launched(), pytest.raises(UnpicklableError, match=expected):
        local().run(*call(lock), **given)


@pytest.mark.spark
@pytest.mark.parametrize("local_mode", [True, False])
@each_hiding_place
def test_a_spark_session_cannot_be_sent(
    spark: Any, nothing_launched: Any, message: str, call: Any, kwargs: Any, local_mode: bool
) -> None:
    runner = local(2, local_mode=local_mode)
    given = {name: make(spark) for name, make in kwargs.items()}
    expected = f"{message}SparkSession .*Ranks have no Spark"
    with nothing_launched(), pytest.raises(UnpicklableError, match=expected):
        runner.run(*call(spark), **given)


@pytest.mark.spark
@pytest.mark.parametrize(("settings", "kind", "message"), BAD_SETTINGS[::4])
def test_an_invalid_setting_on_a_cluster(
    spark: Any,
    nothing_launched: Any,
    settings: dict[str, Any],
    kind: type[Exception],
    message: str,
) -> None:
    settings = {"num_processes": 2, "local_mode": False, "use_gpu": False, **settings}
    with nothing_launched(), pytest.raises(kind, match=message):
        TorchDistributor(**settings).run(train)


@pytest.mark.spark
@pytest.mark.parametrize("address", ["192.0.2.77", "192.0.2.77:7077", "no-such-host.invalid"])
def test_a_hub_address_that_cannot_be_bound(
    spark: Any, nothing_launched: Any, address: str
) -> None:
    runner = TorchDistributor(2, local_mode=False, use_gpu=False, hub_address=address)
    host = re.escape(address.partition(":")[0])
    with nothing_launched(), pytest.raises(OSError, match=f"hub_address .*{host}.* address of"):
        runner.run(train)


@pytest.mark.spark
def test_a_hub_address_whose_port_is_taken(spark: Any, nothing_launched: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        runner = TorchDistributor(2, local_mode=False, use_gpu=False, hub_address=address)
        with nothing_launched(), pytest.raises(OSError, match=f"{address}.*a port that is free"):
            runner.run(train)


@pytest.mark.parametrize("before", ["", "import pyspark.sql"])
def test_distributed_mode_without_a_spark_session(run_driver: Any, before: str) -> None:
    done = run_driver(
        f"""
        {before}
        from distributor import TorchDistributor
        try:
            TorchDistributor(2, local_mode=False, use_gpu=False).run(print)
        except RuntimeError as error:
            print(type(error).__name__, error)
        """
    )
    assert done.stdout.startswith("RuntimeError Distributed mode runs on the active Spark session")
    assert "SparkSession.builder.getOrCreate()" in done.stdout
    assert "local_mode=True" in done.stdout
    assert "Started" not in done.stdout + done.stderr


def test_a_launch_is_detected(nothing_launched: Any) -> None:
    """Otherwise the other tests could not fail."""
    with pytest.raises(AssertionError, match="distributor"), nothing_launched():
        assert local().run(train) == "launched"


@pytest.mark.spark
def test_a_spark_job_is_detected(spark: Any, nothing_launched: Any) -> None:
    with pytest.raises(AssertionError), nothing_launched():
        spark.range(3).collect()
