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
from support.tracking_server import PRELOAD, metrics_of, mlflow, needs_mlflow, runs_of, train

from distributor import TorchDistributor

pytestmark = needs_mlflow
cloudpickle.register_pickle_by_value(sys.modules[__name__])
Distribute = Callable[..., TorchDistributor]
RunDriver = Callable[..., "subprocess.CompletedProcess[str]"]


def variables() -> set[str]:
    return set(os.environ)


def test_a_job_that_does_not_use_mlflow_has_no_run(distribute: Distribute, tmp_path: Path) -> None:
    assert not [name for name in distribute(1).run(variables) if name.startswith("MLFLOW_RUN")]


def test_a_preloaded_mlflow_sets_no_variables_in_a_job_that_does_not_use_it() -> None:
    ranks = TorchDistributor(1, use_gpu=False, timeout=120, preload=PRELOAD)
    added = ranks.run(variables) - set(os.environ)
    assert not [name for name in added if name.startswith("MLFLOW_")]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """Set a store that is a file of this machine, and yield its address."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow.set_tracking_uri(uri)
    yield uri
    mlflow.set_tracking_uri(None)
    os.environ.pop("MLFLOW_EXPERIMENT_ID", None)


@pytest.mark.slow
def test_local_ranks_log_to_a_run_in_a_local_file(store: str) -> None:
    with mlflow.start_run() as mine:
        TorchDistributor(2, use_gpu=False, timeout=120).run(train, 2)

    assert metrics_of(mlflow.get_run(mine.info.run_id)) == {"loss": 0.5}


@pytest.mark.slow(ci=True)
@pytest.mark.spark
def test_executors_of_this_machine_log_to_a_run_in_a_local_file(spark: Any, store: str) -> None:
    TorchDistributor(2, local_mode=False, use_gpu=False, timeout=120).run(train, 2)

    [run] = runs_of("0")
    assert run.info.run_name == "train"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"rank": "0"}
    assert metrics_of(run) == {"loss": 0.5}
    assert run.data.tags["distributor.num_processes"] == "2"
    assert run.data.tags["distributor.mode"] == "cluster"


ON_A_CLUSTER = """
import os, mlflow

def train():
    import mlflow, os
    mlflow.log_metric("loss", 1.0)
    found = mlflow.active_run().info.artifact_uri.partition(":")[0]
    return found, os.environ.get("MLFLOW_RUN_ID"), sorted(os.listdir())

runner = TorchDistributor(
    2, local_mode=False, use_gpu=False, timeout=120, preload=["mlflow"]
)
before = runner.run_all(lambda: sorted(os.listdir()))
send(unset=runner.run_all(train), before=before, created=os.path.exists("mlflow.db"))
mlflow.set_tracking_uri("sqlite:///mine.db")
with mlflow.start_run():
    send(in_a_file=runner.run_all(train))
spark.stop()
"""


@pytest.mark.slow
@pytest.mark.spark
def test_on_a_cluster_without_a_server_mlflow_is_off(tmp_path: Path) -> None:
    with (
        machines_on_loopback(3) as machines,
        cluster_on(machines, tmp_path, cores=2) as cluster,
        cluster.driver(ON_A_CLUSTER, **{"spark.executor.cores": "2"}) as driver,
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

PRELOAD = ["mlflow", "mlflow.store.tracking.sqlalchemy_store"]

@distributed(gpus=4, use_gpu=False, mlflow_ranks=sys.argv[1], timeout=120, preload=PRELOAD)
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
import importlib.machinery, json, os, sys
from distributor import TorchDistributor

def train():
    return "trained"

def hide_mlflow():
    # As if it were not installed.
    find_spec = importlib.machinery.PathFinder.find_spec

    def find_others(name, *args):
        return None if name == "mlflow" else find_spec(name, *args)

    importlib.machinery.PathFinder.find_spec = find_others
    assert importlib.util.find_spec("mlflow") is None

if __name__ == "__main__":
    runner = TorchDistributor(1, use_gpu=False, timeout=120)
    facts = [runner.run(train), "mlflow" in sys.modules, os.path.exists("mlflow.db")]
    hide_mlflow()
    os.environ["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:1"
    print("FACTS " + json.dumps([*facts, runner.run(train)]))
"""


def test_a_program_that_does_not_use_mlflow_imports_and_stores_nothing_and_does_not_need_it(
    run_driver: RunDriver,
) -> None:
    assert facts_in(run_driver(UNRELATED)) == ["trained", False, False, "trained"]


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
    return os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT")

if __name__ == "__main__":
    runner = TorchDistributor(2, use_gpu=False, timeout=120, preload=["mlflow"])
    timeouts = [runner.run(train, uri) for uri in sys.argv[1:]]
    print("FACTS " + json.dumps([os.path.exists("mlflow.db"), *timeouts]))
"""


def run_and_check_the_run_on_the_server(
    run_driver: RunDriver, source: str, addresses: list[str]
) -> subprocess.CompletedProcess[str]:
    """Run a job for each address, of which the last is a server, and return the output."""
    client = mlflow.MlflowClient(addresses[-1])
    before = len(client.search_runs(["0"]))
    done = run_driver(source, *addresses)
    [run, *_] = runs = client.search_runs(["0"], order_by=["start_time DESC"])
    assert len(runs) == before + 1
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"loss": 1.0})
    return done


def test_if_its_use_is_not_detected_mlflow_is_off_except_for_a_server_that_ranks_name(
    run_driver: RunDriver, server: str
) -> None:
    """One rank prints that it is off. A server that does not answer must not hold up training."""
    done = run_and_check_the_run_on_the_server(run_driver, HIDDEN, ["", server])
    assert facts_in(done) == [False, None, "10"]
    assert done.stderr.count("MLflow is off: no use of it was detected on the driver") == 1


@pytest.mark.slow
def test_a_server_that_only_the_ranks_code_names_gets_one_run(
    run_driver: RunDriver, server: str
) -> None:
    detected = HIDDEN.replace('"".join(["ml", "flow"])', '"mlflow"')
    run_and_check_the_run_on_the_server(run_driver, detected, [server])
