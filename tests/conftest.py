"""Fixtures: both launchers, the session's one Spark, and driver programs in processes of their own.

Spark and torch are never mocked here: ranks are real processes, and the cluster is a real one.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from support.gpus import make_discovery_script, run_gpu_driver  # noqa: F401  (fixtures)
from support.packages import variables_for
from support.tracking_server import experiment, server  # noqa: F401  (fixtures)
from support.waiting import DEADLINE, until
from support.zygotes import modules_folder, without_torch, write_module  # noqa: F401  (fixtures)

from distributor import TorchDistributor
from distributor._compat.pyspark import java_context

os.environ["NO_COLOR"] = "1"  # texts are compared
os.environ.setdefault("DISTRIBUTOR_IDLE_IMPORT_SECONDS", "600")  # inherited by all processes
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell's script
    signal.signal(signal.SIGINT, signal.default_int_handler)  # inherited, too
CLUSTER = "local-cluster[2,2,1024]"
settings.register_profile("distributor", deadline=None)  # no test fails because it was slow
settings.load_profile("distributor")
LOGGERS = ("distributor", "TorchDistributor", "DeepspeedTorchDistributor")
"""The loggers of this package's messages."""

needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java")

needs_late_threads = pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 2),
    reason="Python 3.12.0 and 3.12.1 start no thread once the main thread has ended",
)


def has_connect() -> bool:
    """Return True if Connect works offline: PySpark 3.5 would download its server."""
    pyspark = find_spec("pyspark")
    if pyspark is None or pyspark.origin is None or find_spec("grpc") is None:
        return False
    return any(Path(pyspark.origin).parent.glob("jars/spark-connect_*.jar"))


needs_connect = pytest.mark.skipif(not has_connect(), reason="no Connect server is installed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        from support.scheduling import arrange

        groups = arrange(items)
        if config.workerinput["workerid"] == "gw0":
            Path(config.workerinput["groups"]).write_text(json.dumps(groups))


def pytest_configure(config: pytest.Config) -> None:
    """Keep the runs of tests out of the user's own; each process of pytest-xdist has a folder."""
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ["XDG_STATE_HOME"] = folder.name  # inherited by all processes


GROUPS = pytest.StashKey[Path]()
"""The file to which a process of pytest-xdist writes the groups of the tests."""


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["groups"] = str(groups_file(node.config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadscope":
        return None
    from support.scheduling import Scheduler

    return Scheduler(config, log, groups_file(config))


def groups_file(config: pytest.Config) -> Path:
    if GROUPS not in config.stash:
        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        config.stash[GROUPS] = Path(folder.name, "groups.json")
    return config.stash[GROUPS]


def facts_in(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Read what a driver program reports with ``print("FACTS " + json.dumps(...))``."""
    reports = [line for line in done.stdout.splitlines() if line.startswith("FACTS ")]
    assert len(reports) == 1, done.stdout[-4000:] + done.stderr[-8000:]
    facts: dict[str, Any] = json.loads(reports[0].removeprefix("FACTS "))
    return facts


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that lists this package's warnings so far, and no other's."""

    def messages() -> list[str]:
        ours = [record for record in caplog.records if record.name in LOGGERS]
        return [record.getMessage() for record in ours if record.levelno == logging.WARNING]

    return messages


@pytest.fixture
def restored_loggers() -> Iterator[None]:
    """Restore the loggers, which PySpark's classes configure."""
    found = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.level, list(logger.handlers)) for logger in found]
    yield
    for logger, (level, handlers) in zip(found, before, strict=True):
        logger.setLevel(level)
        logger.handlers = handlers


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """Return the session's one Spark: two executors of two cores, in processes of their own."""
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master(CLUSTER)
        .appName("distributor tests")
        .config("spark.ui.enabled", "false")
        # Sessions that start in the same second would share an identifier, and so their folders.
        .config("spark.deploy.appIdPattern", f"app-%s-%04d-{os.getpid()}")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "OFF")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    status = java_context(session.sparkContext)  # a barrier stage fails if an executor is missing
    until(lambda: status.getExecutorMemoryStatus().size() == 3, "both executors start", DEADLINE)
    yield session
    session.stop()


cluster_is_slow = pytest.mark.parametrize(
    "distribute",
    ["local", pytest.param("cluster", marks=[pytest.mark.slow, pytest.mark.spark])],
    indirect=True,
)
"""For tests whose run on a cluster is a variation."""


@pytest.fixture(params=["local", pytest.param("cluster", marks=pytest.mark.spark)])
def distribute(request: pytest.FixtureRequest) -> Callable[..., TorchDistributor]:
    """Make a distributor on CPU ranks, once per launcher: ``distribute(3, timeout=60)``."""
    local_mode = request.param == "local"
    if not local_mode:
        request.getfixturevalue("spark")

    def make(num_processes: int = 2, **settings: Any) -> TorchDistributor:
        return TorchDistributor(
            num_processes, local_mode=local_mode, use_gpu=False, **{"timeout": 120, **settings}
        )

    return make


@pytest.fixture
def run_driver(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a driver program in an interpreter of its own: ``run_driver(source, env=...)``."""

    def run(
        source: str,
        *args: str,
        env: dict[str, str] | None = None,
        ok: bool = True,
        timeout: float = DEADLINE,
    ) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "driver.py"
        script.write_text(textwrap.dedent(source))
        done = subprocess.run(
            [sys.executable, str(script), *args],
            env=variables_for(source, env or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=tmp_path,
        )
        if ok:
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        return done

    return run


NVML = """
#include <string.h>
int nvmlInitWithFlags(unsigned int flags) { return INIT; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = COUNT; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) { return 0; }
int nvmlDeviceGetName(void *device, char *name, unsigned int room) {
    strncpy(name, "NVIDIA A10G", room);
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *device, unsigned int *rates) {
    rates[0] = 31;
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
    memory[0] = 4000;
    memory[2] = 1000;
    return 0;
}
int nvmlShutdown(void) { return 0; }
"""
"""The functions of the NVIDIA driver's library that the package calls."""


@pytest.fixture
def nvml(tmp_path: Path) -> Callable[..., str]:
    """Return a function that builds an NVIDIA driver's library, and returns its folder."""
    if (gcc := shutil.which("gcc")) is None:
        pytest.skip("there is no gcc to build a driver library with")

    def build(count: int, *, init: int = 0) -> str:
        source, folder = tmp_path / "nvml.c", tmp_path / "nvml"
        source.write_text(NVML)
        folder.mkdir()
        options = ["-shared", "-fPIC", f"-DCOUNT={count}", f"-DINIT={init}", "-o"]
        subprocess.run([gcc, *options, folder / "libnvidia-ml.so.1", source], check=True)
        return str(folder)

    return build
