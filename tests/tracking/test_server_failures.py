"""A tracking server that fails, refuses or is not there costs a warning, and no training."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle
import pytest
from conftest import cluster_is_slow, facts_in
from support.cluster import cluster_on
from support.machines import machines_on_loopback
from support.ports import free_port
from support.ranks import Distribute
from support.tracking_server import PRELOAD, mlflow, needs_mlflow, train

from distributor import tracking

pytestmark = needs_mlflow
cloudpickle.register_pickle_by_value(sys.modules[__name__])
RunDriver = Callable[..., "subprocess.CompletedProcess[str]"]


@cluster_is_slow
def test_training_continues_if_the_server_goes_away(
    distribute: Distribute, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tracking.TrackedRun("0" * 32, "1", f"http://127.0.0.1:{free_port()}", False)
    monkeypatch.setattr("distributor.torch_distributor.open_run", lambda *_: gone)
    limits = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}

    assert distribute(2, env=limits, preload=PRELOAD).run(train, 2) == "trained"
    err = capsys.readouterr().err
    assert err.count("The MLflow server did not accept what was logged") == 1
    assert "3 calls did not reach MLflow" in err


@pytest.fixture(params=["refused", "unanswered"])
def gone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Set the address of a server that refuses connections, or accepts them and never answers."""
    with socket.create_server(("127.0.0.1", free_port())) as listener:
        uri = f"http://127.0.0.1:{listener.getsockname()[1]}"
        if request.param == "refused":
            listener.close()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        monkeypatch.setattr(tracking, "ANSWER_SECONDS", 1.0)
        yield uri


def use_mlflow_in_many_ways(uri: str, folder: str) -> list[str]:
    """Do what training functions do with MLflow, and return the names of the files it created."""
    from pathlib import Path

    import mlflow
    import torch

    Path(folder, os.environ["RANK"]).mkdir()
    os.chdir(Path(folder, os.environ["RANK"]))
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment("mine")
    mlflow.pytorch.autolog()
    with mlflow.start_run(run_name="named") as run:
        mlflow.log_metric("late", 1.0, synchronous=False).wait()
        mlflow.log_table({"a": [1]}, "table.json")
        mlflow.log_artifact(torch.__file__)
        mlflow.pytorch.log_model(
            torch.nn.Linear(2, 1), name="model", registered_model_name="registered"
        )
        with mlflow.start_run(nested=True):
            mlflow.log_metric("inner", 1.0)
        assert mlflow.active_run().info.run_id == run.info.run_id
    mlflow.log_metric("bare", 1.0)
    client = mlflow.MlflowClient()  # as loggers of frameworks
    client.log_batch(client.create_run(client.create_experiment("new")).info.run_id)
    return sorted(os.listdir())


@cluster_is_slow
def test_mlflow_is_off_if_the_server_cannot_be_reached_at_the_start(
    distribute: Distribute, gone: str, warned: Callable[[], list[str]], tmp_path: Path
) -> None:
    """Without that, MLflow would retry for minutes in each rank, and then raise."""
    ranks = distribute(2, timeout=90, preload=PRELOAD)
    assert ranks.run_all(use_mlflow_in_many_ways, gone, str(tmp_path)) == [[], []]
    [warning] = warned()
    assert f"The MLflow server at {gone} cannot be reached, so this run is not tracked" in warning


ON_A_CLUSTER = """
import os, mlflow

def train():
    import mlflow, os
    mlflow.log_metric("loss", 1.0)
    found = mlflow.active_run().info.artifact_uri.partition(":")[0]
    return found, os.environ.get("MLFLOW_RUN_ID"), sorted(os.listdir())

runner = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=120, preload=["mlflow"])
before = runner.run_all(lambda: sorted(os.listdir()))
send(found=runner.run_all(train), before=before, created=os.path.exists("mlflow.db"))
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
        sent = driver.receive("found")
        log = driver.log.read_text()

    for before, (scheme, run_id, after) in zip(sent["before"], sent["found"], strict=True):
        assert (scheme, run_id, after) == ("distributor-nowhere", None, before)
    assert not sent["created"]
    assert log.count("this run is not tracked and MLflow is off in its ranks") == 1
    assert log.count("set MLFLOW_TRACKING_URI to its address") == 1


IN_AN_EMPTY_FOLDER = """
import json, os, sys
from distributor.serverless_gpu import distributed, runtime

PRELOAD = ["mlflow", "mlflow.store.tracking.sqlalchemy_store"]

@distributed(gpus=4, use_gpu=False, mlflow_ranks="all", timeout=120, preload=PRELOAD)
def train():
    import mlflow

    for step in range(50):
        mlflow.log_metric(f"loss_{runtime.get_global_rank()}", 0.5, step=step)

if __name__ == "__main__":
    train.distributed()
    import mlflow

    [run] = mlflow.search_runs(output_format="list")
    names = [f"loss_{rank}" for rank in range(4)]
    history = mlflow.MlflowClient().get_metric_history
    counts = [len(history(run.info.run_id, name)) for name in names]
    print("FACTS " + json.dumps([counts, os.path.exists("mlflow.db")]))
"""


@pytest.mark.slow
def test_without_a_server_all_ranks_log_to_one_local_run(run_driver: RunDriver) -> None:
    done = run_driver(IN_AN_EMPTY_FOLDER)
    assert facts_in(done) == [[50] * 4, True]
    assert "locked" not in done.stderr


UNRELATED = """
import json, os, sys
from distributor import TorchDistributor

if __name__ == "__main__":
    value = TorchDistributor(1, use_gpu=False, timeout=120).run(lambda: "trained")
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
    return os.environ.get(flow.__name__.upper() + "_HTTP_REQUEST_TIMEOUT")

if __name__ == "__main__":
    runner = TorchDistributor(2, use_gpu=False, timeout=120, preload=["mlflow"])
    timeouts = [runner.run(train, uri) for uri in ("", sys.argv[1])]
    print("FACTS " + json.dumps([os.path.exists("mlflow.db"), *timeouts]))
"""


@pytest.mark.slow
def test_if_its_use_is_not_detected_mlflow_is_off_except_for_a_server_that_ranks_name(
    run_driver: RunDriver, server: str
) -> None:
    """One rank prints that it is off. A server that does not answer must not hold up training."""
    client = mlflow.MlflowClient(server)
    before = len(client.search_runs(["0"]))
    done = run_driver(HIDDEN, server)
    [run, *_] = runs = client.search_runs(["0"], order_by=["start_time DESC"])
    assert len(runs) == before + 1
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"loss": 1.0})
    assert facts_in(done) == [False, None, "10"]
    assert done.stderr.count("MLflow is off: no use of it was detected on the driver") == 1
