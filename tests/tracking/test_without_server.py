"""MLflow in a job without a tracking server: a local store, or MLflow is off."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from conftest import facts_in
from support.cluster import cluster_on
from support.machines import machines_on_loopback
from support.tracking_server import metrics_of, train

from distributor import TorchDistributor

mlflow: Any = pytest.importorskip("mlflow")
cloudpickle.register_pickle_by_value(sys.modules[__name__])
Distribute = Callable[..., TorchDistributor]
RunDriver = Callable[..., "subprocess.CompletedProcess[str]"]


def test_a_job_that_does_not_use_mlflow_has_no_run(distribute: Distribute, tmp_path: Path) -> None:
    def variables() -> list[str]:
        return [name for name in os.environ if name.startswith("MLFLOW_RUN")]

    assert distribute(1).run(variables) == []


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """Set a store that is a file of this machine, and yield its address."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow.set_tracking_uri(uri)
    yield uri
    mlflow.set_tracking_uri(None)
    os.environ.pop("MLFLOW_EXPERIMENT_ID", None)


def test_local_ranks_log_to_a_run_in_a_local_file(store: str) -> None:
    with mlflow.start_run() as mine:
        TorchDistributor(2, use_gpu=False, timeout=120).run(train, 2)

    assert metrics_of(mlflow.get_run(mine.info.run_id)) == {"loss": 0.5}


@pytest.mark.spark
def test_executors_of_this_machine_log_to_a_run_in_a_local_file(spark: Any, store: str) -> None:
    with mlflow.start_run() as mine:
        TorchDistributor(2, local_mode=False, use_gpu=False, timeout=120).run(train, 2)

    assert metrics_of(mlflow.get_run(mine.info.run_id)) == {"loss": 0.5}


ON_A_CLUSTER = """
import os, mlflow

def train():
    import mlflow, os
    mlflow.log_metric("loss", 1.0)
    found = mlflow.active_run().info.artifact_uri.partition(":")[0]
    return found, os.environ.get("MLFLOW_RUN_ID"), sorted(os.listdir())

runner = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=120)
before = runner.run_all(lambda: sorted(os.listdir()))
send(unset=runner.run_all(train), before=before, created=os.path.exists("mlflow.db"))
mlflow.set_tracking_uri("sqlite:///mine.db")
with mlflow.start_run():
    send(in_a_file=runner.run_all(train))
spark.stop()
"""


@pytest.mark.spark
def test_on_a_cluster_without_a_server_mlflow_is_off(tmp_path: Path) -> None:
    with (
        machines_on_loopback(3) as machines,
        cluster_on(machines, tmp_path, cores=2) as cluster,
        cluster.driver(ON_A_CLUSTER) as driver,
    ):
        unset = driver.receive("unset")
        in_a_file = driver.receive("in_a_file")["in_a_file"]
        log = driver.log.read_text()

    for before, (scheme, run_id, after) in zip(unset["before"], unset["unset"], strict=True):
        assert (scheme, run_id, after) == ("distributor-nowhere", None, before)
    assert not unset["created"]
    assert [scheme for scheme, *_ in in_a_file] == ["distributor-nowhere"] * 2
    assert log.count("this run is not tracked and MLflow is off in its ranks") == 2
    assert "MLflow's store is sqlite:" in log
    assert "The active MLflow run is in sqlite:" in log
    assert log.count("set MLFLOW_TRACKING_URI to its address") == 2


IN_AN_EMPTY_FOLDER = """
import json, os, sys
from distributor.serverless_gpu import distributed, runtime

@distributed(gpus=4, use_gpu=False, mlflow_ranks=sys.argv[1], timeout=120)
def train(steps):
    import mlflow

    for step in range(steps):
        mlflow.log_metric(f"loss_{runtime.get_global_rank()}", 0.5, step=step)
    return runtime.get_global_rank()

if __name__ == "__main__":
    assert "mlflow" not in sys.modules
    values = train.distributed(steps=int(sys.argv[2])), train.distributed(steps=1)
    import mlflow

    history = mlflow.MlflowClient().get_metric_history
    runs = [
        {name: len(history(run.info.run_id, name)) for name in run.data.metrics if "loss" in name}
        for run in mlflow.search_runs(output_format="list", order_by=["start_time"])
    ]
    print("FACTS " + json.dumps([values, runs, sorted(os.listdir())]))
"""


def test_without_a_server_all_ranks_log_to_one_local_run(
    run_driver: RunDriver, tmp_path: Path
) -> None:
    done = run_driver(IN_AN_EMPTY_FOLDER, "all", "50")
    values, runs, files = facts_in(done)

    assert values == [[0, 1, 2, 3]] * 2
    assert runs == [{f"loss_{rank}": 50 for rank in range(4)}, {f"loss_{r}": 1 for r in range(4)}]
    assert "mlflow.db" in files
    assert f"MLflow run: sqlite:///{tmp_path}/mlflow.db experiments/0/runs/" in done.stderr
    assert "locked" not in done.stderr


UNRELATED = """
import json, os, sys
from distributor import TorchDistributor

def train():
    return "trained"

if __name__ == "__main__":
    value = TorchDistributor(1, use_gpu=False, timeout=120).run(train)
    print("FACTS " + json.dumps([value, "mlflow" in sys.modules, os.path.exists("mlflow.db")]))
"""


def test_a_program_that_does_not_use_mlflow_imports_and_stores_nothing(
    run_driver: RunDriver,
) -> None:
    assert facts_in(run_driver(UNRELATED)) == ["trained", False, False]


HIDDEN = """
import json, os, sys
from distributor import TorchDistributor

def train(uri):
    import importlib

    flow = importlib.import_module("".join(["ml", "flow"]))
    if uri:
        flow.set_tracking_uri(uri)
    with flow.start_run():
        flow.log_metric("loss", 1.0)

if __name__ == "__main__":
    TorchDistributor(2, use_gpu=False, timeout=120).run(train, sys.argv[1])
    print("FACTS " + json.dumps(os.path.exists("mlflow.db")))
"""


def test_one_rank_prints_that_mlflow_is_off_if_its_use_is_not_detected(
    run_driver: RunDriver,
) -> None:
    done = run_driver(HIDDEN, "")
    assert facts_in(done) is False
    assert done.stderr.count("MLflow is off: no use of it was detected on the driver") == 1


@pytest.mark.parametrize("source", [HIDDEN, HIDDEN.replace('"".join(["ml", "flow"])', '"mlflow"')])
def test_a_server_that_only_the_ranks_code_names_gets_one_run(
    run_driver: RunDriver, server: str, source: str
) -> None:
    client = mlflow.MlflowClient(server)
    before = len(client.search_runs(["0"]))
    run_driver(source, server)
    [run, *_] = runs = client.search_runs(["0"], order_by=["start_time DESC"])
    assert len(runs) == before + 1
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"loss": 1.0})


WITHOUT_MLFLOW = """
import json, sys
sys.modules["mlflow"] = None  # as if it were not installed
from distributor import TorchDistributor
value = TorchDistributor(1, use_gpu=False).run(lambda: "trained")
print("FACTS " + json.dumps(value))
"""


def test_a_run_does_not_need_mlflow(run_driver: RunDriver) -> None:
    done = run_driver(WITHOUT_MLFLOW.replace("= None", '= None; del sys.modules["mlflow"]'))

    assert facts_in(done) == "trained"
