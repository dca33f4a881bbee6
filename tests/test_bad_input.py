"""Bad input is one clear error, raised before a process is started or a Spark job submitted."""

from __future__ import annotations

import contextlib
import functools
import re
import socket
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from distributor import TorchDistributor, UnpicklableError, distributed
from distributor.screen.messages import warn_once

FOLDER = Path(__file__).parent
NAN = float("nan")

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


IN_PLACE = {"num_processes": 2, "recovery": "in_place", "max_failures": 1}
BAD_SETTINGS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_processes": 0}, ValueError, "num_processes has to be a positive integer, but is 0"),
    ({"num_processes": True}, TypeError, "num_processes .* but is True of type bool"),
    ({"num_processes": [4, 2]}, ValueError, r"num_processes .*but is \[4, 2\]: the minimum is"),
    ({"num_workers": 2}, TypeError, "argument 'num_workers'. Did you mean 'num_processes'?"),
    ({"colour": "red"}, TypeError, "argument 'colour'. It takes barrier, env, .*warm"),
    ({"use_gpu": 2}, TypeError, "use_gpu must be True or False, but is 2 of type int"),
    (
        {"executor_resources": {"spark.executor.memry": "8g"}},
        ValueError,
        "executor_resources has 'spark.executor.memry', .* It takes spark.executor.cores, ",
    ),
    ({"env": {"A": 1}}, TypeError, r"env must map strings .* 'A': 1 \(str to int\)"),
    ({"env": {"RANK": "1"}}, ValueError, "env must not set RANK: the launcher sets it"),
    ({"mlflow_ranks": "some"}, ValueError, "mlflow_ranks must be 'first' or 'all', but is 'some'"),
    ({"timeout": NAN}, ValueError, "timeout must be a positive, .* but is nan"),
    ({"start_timeout": None}, TypeError, "start_timeout must be a .* seconds, but is None"),
    ({"show_output": "loud"}, ValueError, r"show_output must be 'all', 'none' or .* but is 'loud'"),
    ({"hub_address": "host:abc"}, ValueError, "hub_address must be .* but is 'host:abc'"),
    ({"hub_address": "fd00::2"}, ValueError, r"IPv6 .*brackets.* but is 'fd00::2'"),
    ({"hub_port": 65536}, ValueError, "hub_port is a port from 1 to 65535, .* not 65536"),
    ({"rank_ports": "9-8"}, ValueError, "rank_ports .*from a lower to a higher .* is '9-8'"),
    ({"name": "a"}, ValueError, "name is 'a', but storage_path is not set"),
    ({"log_dir": __file__}, NotADirectoryError, f"log_dir .* but '{re.escape(__file__)}'"),
    ({"environment": "no.tar.gz"}, FileNotFoundError, "no packed environment 'no.tar.gz' .looked"),
    ({"environment": __file__}, ValueError, "a packed environment ends in .tar.gz, .*as a list"),
    ({"recovery": 1}, ValueError, "recovery must be 'restart' or 'in_place', but is 1"),
    ({**IN_PLACE, "max_failures": 0}, ValueError, "in_place', but max_failures is 0, so"),
    ({**IN_PLACE, "num_processes": 1}, ValueError, "in_place', but num_processes is 1: "),
    ({**IN_PLACE, "barrier": True}, ValueError, "in_place', but barrier is True, and"),
    ({"py_modules": "named"}, TypeError, "py_modules lists modules by name .* but is 'named'"),
]


@pytest.mark.parametrize(("settings", "kind", "message"), BAD_SETTINGS)
def test_an_invalid_setting(
    nothing_launched: Any, settings: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with nothing_launched(), pytest.raises(kind, match=message):
        local(**settings).run(train)


@pytest.mark.spark
def test_an_invalid_setting_on_a_cluster(spark: Any, nothing_launched: Any) -> None:
    for settings, kind, message in BAD_SETTINGS[::4]:
        settings = {"num_processes": 2, "local_mode": False, "use_gpu": False, **settings}
        with nothing_launched(), pytest.raises(kind, match=message):
            TorchDistributor(**settings).run(train)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = f"127.0.0.1:{taken.getsockname()[1]}"
        for address, message in (("192.0.2.77", "address of"), (busy, "a port that is free")):
            runner = TorchDistributor(2, local_mode=False, use_gpu=False, hub_address=address)
            with nothing_launched(), pytest.raises(OSError, match=f"{address}.* {message}"):
                runner.run(train)


def test_settings_that_have_no_effect(warned: Callable[[], list[str]]) -> None:
    warn_once.cache_clear()
    for _ in range(2):
        local(pool="etl", hub_port=7391, gpu_type="A10", preload=["json"])
    assert warned() == [
        "pool and hub_port have no effect: the ranks run on this machine, without Spark.",
        "gpu_type has no effect: the ranks have no GPUs.",
        "preload has no effect: each rank starts a new interpreter (warm is off).",
    ]


THIS = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lib/python3.2/os.py", f"with Python 3.2, and this process runs Python {THIS}"),
        ("a", "there is no lib/pythonX.Y"),
        (None, "cannot be read as an archive: "),
    ],
)
def test_an_archive_that_is_not_an_environment(
    nothing_launched: Any, tmp_path: Path, name: str | None, message: str
) -> None:
    archive = tmp_path / "environment.tar.gz"
    archive.write_bytes(b"no archive")
    if name is not None:
        with tarfile.open(archive, "w:gz") as packed:
            packed.addfile(tarfile.TarInfo(name))
    with nothing_launched(), pytest.raises(ValueError, match=message) as caught:
        local(environment=archive).run(train)
    assert str(archive) in str(caught.value)


async def sleep() -> None: ...


def count() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("train_object", "kind", "message"),
    [
        (sleep, TypeError, "sleep is an async function: .* not run its body. .*asyncio.run"),
        (functools.partial(sleep), TypeError, "sleep is an async function"),
        (count, TypeError, "count is a generator: .* Return a list"),
        (3, TypeError, "run takes a callable or the path of a Python script, but got 3 of type"),
        ("no/such/train.py", FileNotFoundError, "no script no/such/train.py .looked in /"),
        (FOLDER, IsADirectoryError, f"{re.escape(str(FOLDER))} is a folder"),
    ],
)
def test_an_invalid_train_object(
    nothing_launched: Any, train_object: Any, kind: type[Exception], message: str
) -> None:
    with nothing_launched(), pytest.raises(kind, match=message):
        local().run(train_object)


def test_a_file_that_is_no_script(nothing_launched: Any, tmp_path: Path) -> None:
    for source, kind, message in (
        ('{"cells": [], "nbformat": 4}', ValueError, "file is a notebook"),
        ('{"lr": 1}', ValueError, "file is not a Python script"),
        ("def (:", SyntaxError, "invalid syntax .*file.py, line 1"),
    ):
        path = tmp_path / ("file.py" if kind is SyntaxError else "file")
        path.write_text(source)
        with nothing_launched(), pytest.raises(kind, match=message):
            local().run(str(path))


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
    with nothing_launched(), pytest.raises(ValueError, match="Pass epochs, lr as"):
        runner.run(__file__, lr=0.1, epochs=3)
    assert distributed(gpus=1, use_gpu=False)(of_three_epochs).distributed() == [3], (
        "a decorator may add arguments"
    )


def helpers_closure(culprit: object) -> Callable[[], object]:
    guarded = culprit

    def helper() -> object:
        return guarded

    def work() -> object:
        return helper()

    return work


class Trainer:
    """Holds an object that cannot be pickled in a nested attribute."""

    def __init__(self, culprit: object) -> None:
        self.guarded = {"inside": [culprit]}

    def train(self) -> None: ...


HIDING_PLACES: list[tuple[str, Callable[[Any], tuple[Any, ...]]]] = [
    (
        "'work' .* the variable 'guarded' used by the variable 'helper' used by work is a ",
        lambda it: (helpers_closure(it),),
    ),
    (r"'train' .* train.__self__.guarded\['inside'\]\[0\] is a ", lambda it: (Trainer(it).train,)),
    (
        r"'train' .* argument 1\['guarded'\]\[1\] is a ",
        lambda it: (train, 0, {"guarded": [0, it]}),
    ),
]


def test_a_lock_cannot_be_sent(nothing_launched: Any) -> None:
    for message, call in HIDING_PLACES:
        expected = f"{message}lock .*Create it inside the function"
        with nothing_launched(), pytest.raises(UnpicklableError, match=expected):
            local().run(*call(threading.Lock()))


@pytest.mark.spark
def test_a_spark_session_cannot_be_sent(spark: Any, nothing_launched: Any) -> None:
    for message, call in HIDING_PLACES:
        expected = f"{message}SparkSession .*Ranks have no Spark"
        with nothing_launched(), pytest.raises(UnpicklableError, match=expected):
            local(2, local_mode=False).run(*call(spark))


def test_distributed_mode_without_a_spark_session(run_driver: Any) -> None:
    done = run_driver(
        """
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


@pytest.mark.spark
def test_a_launch_is_detected(spark: Any, nothing_launched: Any) -> None:
    """Otherwise the other tests could not fail."""
    with pytest.raises(AssertionError, match="distributor"), nothing_launched():
        assert local().run(train) == "launched"
    with pytest.raises(AssertionError), nothing_launched():
        spark.range(3).collect()
