"""One MLflow run for all ranks of a job, on a real server."""

from __future__ import annotations

import base64
import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from conftest import facts_in
from support.cluster import cluster_on
from support.machines import machines_on_loopback
from support.tracking_server import free_port, tracking_server
from support.waiting import comes_true

from distributor import (
    DistributorError,
    TorchDistributor,
    distributed,
    runtime,
)
from distributor.core.redaction import MASK
from distributor.tracking import recorder
from distributor.tracking import run as tracking_run

mlflow: Any = pytest.importorskip("mlflow")
cloudpickle.register_pickle_by_value(sys.modules[__name__])
Distribute = Callable[..., TorchDistributor]
RunDriver = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a server on SQL; give its address."""
    with tracking_server(tmp_path_factory.mktemp("server")) as uri:
        yield uri


@pytest.fixture
def experiment(server: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """Set the server and an experiment of the test's own, as a user does; give its id."""
    mlflow.set_tracking_uri(server)
    yield mlflow.set_experiment(request.node.name).experiment_id
    mlflow.set_tracking_uri(None)
    mlflow.tracking.fluent._active_experiment_id = None
    os.environ.pop("MLFLOW_EXPERIMENT_ID", None)  # which it has set


def runs_of(experiment: str) -> list[Any]:
    return list(mlflow.MlflowClient().search_runs([experiment]))


def metrics_of(run: Any) -> dict[str, float]:
    """What was logged, less what every run that takes a while has of its nodes."""
    metrics = run.data.metrics.items()
    return {name: value for name, value in metrics if not name.startswith("system/")}


def train(steps: int) -> str:
    import mlflow

    for step in range(steps):
        mlflow.log_metric("loss", 1.0 / (step + 1), step=step)
    mlflow.log_params({"rank": os.environ["RANK"]})
    return "trained"


def test_ranks_log_to_one_run_made_for_the_job(distribute: Distribute, experiment: str) -> None:
    distribute(2).run(train, 3)

    [run] = runs_of(experiment)
    assert run.info.run_name == "train"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"rank": "0"}
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [metric.value for metric in history] == [1.0, 0.5, 1 / 3]
    assert run.data.tags["distributor.num_processes"] == "2"
    assert run.data.tags["distributor.mode"] in ("local", "cluster")
    assert run.data.tags["distributor.version.torch"].startswith(
        torch.__version__.partition("+")[0]
    )


def test_a_job_that_begins_again_goes_on_in_its_run(
    distribute: Distribute, experiment: str
) -> None:
    def log() -> None:
        import mlflow

        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        mlflow.log_metric("attempt", attempt, step=attempt)
        if not attempt and os.environ["RANK"] == "0":  # it alone logs, and has
            os._exit(3)

    distribute(2, max_failures=1).run(log)

    [run] = runs_of(experiment)
    assert run.info.status == "FINISHED"
    assert run.data.tags["distributor.attempt"] == "1"
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "attempt")
    assert [metric.value for metric in history] == [0.0, 1.0]


def test_the_link_is_shown(
    distribute: Distribute, experiment: str, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    distribute(1).run(train, 1)

    [run] = runs_of(experiment)
    link = f"{server}/#/experiments/{experiment}/runs/{run.info.run_id}"
    assert f"MLflow run: {link}" in capsys.readouterr().err


def test_all_ranks_log_where_that_is_wanted(distribute: Distribute, experiment: str) -> None:
    def log() -> None:
        import mlflow

        mlflow.log_metric(f"of rank {os.environ['RANK']}", 1.0)

    distribute(3, mlflow_ranks="all").run(log)

    [run] = runs_of(experiment)
    assert metrics_of(run) == {f"of rank {rank}": 1.0 for rank in range(3)}


def test_a_run_that_is_active_here_is_theirs_and_stays_open(
    distribute: Distribute, experiment: str
) -> None:
    with mlflow.start_run(run_name="mine") as mine:
        distribute(2).run(train, 2)
        assert mlflow.get_run(mine.info.run_id).info.status == "RUNNING"
        mlflow.log_metric("afterwards", 1.0)

    [run] = runs_of(experiment)
    assert run.info.run_id == mine.info.run_id
    assert run.info.status == "FINISHED"
    assert metrics_of(run) == {"loss": 0.5, "afterwards": 1.0}


def test_a_rank_that_closes_the_run_does_not_end_it(
    distribute: Distribute, experiment: str
) -> None:
    def close_and_look() -> str:
        import mlflow

        for step in range(2):
            with mlflow.start_run() as run:
                mlflow.log_metric("inside", 1.0, step=step)
        return str(mlflow.get_run(run.info.run_id).info.status)

    assert distribute(1).run(close_and_look) == "RUNNING"
    [run] = runs_of(experiment)
    assert run.info.status == "FINISHED"
    assert metrics_of(run) == {"inside": 1.0}


def test_a_rank_may_name_server_and_experiment_itself(
    distribute: Distribute, experiment: str, server: str
) -> None:
    """As programs do that were written for another launcher."""

    def log() -> None:
        import mlflow

        mlflow.set_tracking_uri(server)
        mlflow.set_experiment(experiment_id=experiment)
        mlflow.log_metric("loss", 1.0)

    distribute(2).run(log)

    [run] = runs_of(experiment)
    assert run.info.run_name == "log"
    assert metrics_of(run) == {"loss": 1.0}


def test_a_failed_job_is_failed_and_says_why(distribute: Distribute, experiment: str) -> None:
    def fail() -> None:
        import mlflow

        if os.environ["RANK"] == "1":
            threading.Event().wait()
        mlflow.log_metric("before", 1.0)
        raise KeyError("on purpose")

    with pytest.raises(KeyError):
        distribute(2).run(fail)

    [run] = runs_of(experiment)
    assert run.info.status == "FAILED"
    assert metrics_of(run) == {"before": 1.0}
    assert run.data.tags["distributor.error"] == "KeyError: 'on purpose'"
    text = mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/distributor/error.txt")
    assert "in fail" in text


def test_what_ranks_printed_is_kept_of_a_failed_job(
    distribute: Distribute, experiment: str
) -> None:
    def fail() -> None:
        print(f"rank {os.environ['RANK']} says {os.environ['MY_TOKEN']}", flush=True)
        raise ValueError(f"wrong token {os.environ['MY_TOKEN']}")

    with pytest.raises(ValueError, match="s3cr3t"):
        distribute(2, env={"MY_TOKEN": "s3cr3t"}).run(fail)

    [run] = runs_of(experiment)
    kept = {
        name: mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/distributor/{name}.txt")
        for name in ("rank_0", "error")
    }
    assert f"rank 0 says {MASK}\n" in kept["rank_0"]
    assert f"ValueError: wrong token {MASK}" in kept["error"]
    assert run.data.tags["distributor.error"] == f"ValueError: wrong token {MASK}"
    assert "s3cr3t" not in "".join(kept.values())


def test_progress_goes_to_the_run_in_batches(distribute: Distribute, experiment: str) -> None:
    def count(most: int) -> None:
        for step in range(most):
            runtime.progress(step, most, loss=float(os.environ["RANK"]), step=step)

    distribute(2).run(count, 1500)

    [run] = runs_of(experiment)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "step")
    assert sorted((metric.step, metric.value) for metric in history) == [
        (step, float(step)) for step in range(1500)
    ]
    assert run.data.metrics["loss"] == 0.0, "only rank 0's"


def test_what_a_node_does_is_recorded_under_its_name(
    experiment: str, nvml: Callable[..., str], run_driver: RunDriver, server: str
) -> None:
    source = f"""
        import json, mlflow
        from distributor import TorchDistributor
        from distributor.node.agent import system_metrics
        system_metrics.SAMPLE_INTERVAL = 0.2
        mlflow.set_tracking_uri({server!r})
        run_id = mlflow.start_run(experiment_id={experiment!r}).info.run_id
        def wait(run_id):
            import mlflow, time
            deadline = time.monotonic() + 60
            while not mlflow.get_run(run_id).data.metrics and time.monotonic() < deadline:
                time.sleep(0.1)
        TorchDistributor(1, use_gpu=False).run(wait, run_id)
        print("FACTS " + json.dumps(mlflow.get_run(run_id).data.metrics))
    """
    done = run_driver(source, env={"LD_LIBRARY_PATH": nvml(2)})
    metrics = facts_in(done)
    [node] = {name.split("/")[1] for name in metrics}
    assert node == f"node0-{socket.gethostname()}"
    figures = {name.rpartition("/")[2]: figure for name, figure in metrics.items()}
    assert 0 <= figures["cpu_utilization_percentage"] <= 100
    assert figures["system_memory_usage_megabytes"] > 0
    assert figures["gpu_1_utilization_percentage"] == 31
    assert figures["gpu_1_memory_usage_percentage"] == 25


@pytest.mark.slow
def test_no_metric_of_eight_ranks_is_lost(experiment: str) -> None:
    def count() -> None:
        for step in range(1000):
            runtime.progress(step, 1000, loss=step / 7)

    TorchDistributor(8, use_gpu=False, mlflow_ranks="all", timeout=300).run(count)

    [run] = runs_of(experiment)
    for rank in range(8):
        history = mlflow.MlflowClient().get_metric_history(run.info.run_id, f"loss/rank_{rank}")
        assert sorted(metric.value for metric in history) == [step / 7 for step in range(1000)]


def test_metrics_wait_for_a_server_that_comes_back(warned: Callable[[], list[str]]) -> None:
    down, came = threading.Event(), list[int]()
    down.set()

    def send(metrics: list[int]) -> None:
        if down.is_set():
            raise ConnectionError("nobody is there")
        came.extend(metrics)

    outbox = recorder.Outbox(send)
    outbox.put(range(2500))
    assert comes_true(lambda: bool(warned()), 60)
    down.clear()
    assert outbox.close() == 0
    assert came == list(range(2500))
    assert len(warned()) == 1


def test_metrics_that_no_server_takes_are_counted(warned: Callable[[], list[str]]) -> None:
    def refuse(metrics: list[int]) -> None:
        raise ConnectionError("nobody is there")

    outbox = recorder.Outbox(refuse)
    outbox.put(range(2500))
    assert outbox.close() == 2500
    assert warned() == ["MLflow's server did not take metrics: nobody is there. Training goes on."]


def test_a_cancelled_job_is_killed(experiment: str, tmp_path: Path) -> None:
    @distributed(gpus=1, use_gpu=False)
    def stay() -> None:
        (tmp_path / "here").touch()
        threading.Event().wait()

    future = stay.distributed_async()
    assert comes_true((tmp_path / "here").exists, 60)
    assert future.cancel()

    [run] = runs_of(experiment)
    assert run.info.status == "KILLED"


def test_only_the_first_rank_logs_artifacts_and_models(
    distribute: Distribute, experiment: str
) -> None:
    def log() -> None:
        import mlflow
        import torch

        mlflow.log_text(os.environ["RANK"], "rank.txt")
        how = {"serialization_format": "pickle", "pip_requirements": ["torch"]}
        mlflow.pytorch.log_model(torch.nn.Linear(2, 1), name="model", **how)

    distribute(2).run(log)

    [run] = runs_of(experiment)
    assert mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/rank.txt") == "0"
    models = mlflow.search_logged_models([experiment], output_format="list")
    assert [model.source_run_id for model in models] == [run.info.run_id]


def test_without_a_server_there_is_no_run(distribute: Distribute, tmp_path: Path) -> None:
    def variables() -> list[str]:
        return [name for name in os.environ if name.startswith("MLFLOW_RUN")]

    assert distribute(1).run(variables) == []


class Perceptron(torch.nn.Sequential):
    """A small model that notebooks define in a cell."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(
            torch.nn.Linear(10, width),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(width, 1),
        )


def fit(epochs: int, batch_size: int) -> float:
    """Train as users of ``serverless_gpu`` do, MLflow in the function."""
    import mlflow
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    model = DistributedDataParallel(Perceptron())
    data = TensorDataset(torch.randn(400, 10), torch.randn(400, 1))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size, sampler=sampler)
    optimizer, total = torch.optim.Adam(model.parameters()), 0.0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            mlflow.log_metric("loss", loss.item(), step=step)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        mlflow.log_metric("total_loss", total, step=epoch)
    dist.destroy_process_group()
    return total


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize("remote", [False, pytest.param(True, marks=pytest.mark.spark)])
def test_training_by_the_decorator_is_one_run(
    experiment: str, request: pytest.FixtureRequest, gpus: int, remote: bool
) -> None:
    if remote:
        request.getfixturevalue("spark")
    trained = distributed(gpus=gpus, remote=remote, use_gpu=False, timeout=120)(fit)

    totals = trained.distributed(epochs=2, batch_size=25)

    [run] = runs_of(experiment)
    history = mlflow.MlflowClient().get_metric_history
    steps = 400 // 25 // gpus
    assert len(history(run.info.run_id, "loss")) == 2 * steps
    assert [m.step for m in history(run.info.run_id, "total_loss")] == [0, 1]
    assert run.data.metrics["total_loss"] == pytest.approx(totals[0])
    assert len(totals) == gpus


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """Set a store that is a file of this machine."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow.set_tracking_uri(uri)
    yield uri
    mlflow.set_tracking_uri(None)
    os.environ.pop("MLFLOW_EXPERIMENT_ID", None)


def test_a_run_in_a_file_here_serves_local_ranks(store: str) -> None:
    with mlflow.start_run() as mine:
        TorchDistributor(2, use_gpu=False, timeout=120).run(train, 2)

    assert metrics_of(mlflow.get_run(mine.info.run_id)) == {"loss": 0.5}


@pytest.mark.spark
def test_a_run_in_a_file_here_serves_executors_of_this_machine(spark: Any, store: str) -> None:
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
send(unset=runner.run_all(train), before=before, here=os.path.exists("mlflow.db"))
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
        told = driver.receive("unset")
        in_a_file = driver.receive("in_a_file")["in_a_file"]
        log = driver.log.read_text()

    for before, (scheme, run_id, after) in zip(told["before"], told["unset"], strict=True):
        assert (scheme, run_id, after) == ("distributor-nowhere", None, before)
    assert not told["here"]
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


OFF_LIMITS = """
import json, os, sys
from distributor import TorchDistributor

def train():
    return "trained"

if __name__ == "__main__":
    value = TorchDistributor(1, use_gpu=False, timeout=120).run(train)
    print("FACTS " + json.dumps([value, "mlflow" in sys.modules, os.path.exists("mlflow.db")]))
"""


def test_a_program_that_does_not_use_mlflow_costs_no_import_and_no_store(
    run_driver: RunDriver,
) -> None:
    assert facts_in(run_driver(OFF_LIMITS)) == ["trained", False, False]


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


def test_a_use_of_mlflow_that_was_not_seen_is_off_and_said_once(run_driver: RunDriver) -> None:
    done = run_driver(HIDDEN, "")
    assert facts_in(done) is False
    assert done.stderr.count("MLflow is off: no use of it was seen where the run was started") == 1


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
sys.modules["mlflow"] = None  # as where it is not installed
from distributor import TorchDistributor
value = TorchDistributor(1, use_gpu=False).run(lambda: "trained")
print("FACTS " + json.dumps(value))
"""


def test_without_mlflow_nothing_changes(run_driver: RunDriver) -> None:
    done = run_driver(WITHOUT_MLFLOW.replace("= None", '= None; del sys.modules["mlflow"]'))

    assert facts_in(done) == "trained"


def test_a_server_that_is_gone_stops_no_training(
    distribute: Distribute, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there when the run began."""
    gone = tracking_run.Tracking("0" * 32, "1", f"http://127.0.0.1:{free_port()}", False)
    monkeypatch.setattr("distributor.torch_distributor.open_run", lambda *_: gone)
    haste = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}

    assert distribute(2, env=haste).run(train, 2) == "trained"
    err = capsys.readouterr().err
    assert err.count("MLflow's server did not take what was logged") == 1
    assert "3 calls did not reach MLflow" in err


def test_a_server_that_is_not_there_costs_a_warning(
    warned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setattr(tracking_run, "ANSWER_SECONDS", 1.0)

    assert TorchDistributor(1, use_gpu=False).run(lambda: "trained") == "trained"
    [warning] = warned()
    assert f"The MLflow server at {uri} cannot be reached, so this run is not tracked" in warning


@pytest.fixture(params=["refused", "unanswered"])
def gone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Set the address of a server that refuses connections, or takes them and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        uri = f"http://127.0.0.1:{listener.getsockname()[1]}"
        if request.param == "refused":
            listener.close()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        monkeypatch.setattr(tracking_run, "ANSWER_SECONDS", 1.0)
        yield uri


def use_all_of_it(uri: str, folder: str) -> list[str]:
    """Do what training functions do with MLflow; return the folder's new files."""
    from pathlib import Path

    import mlflow
    import torch

    Path(folder, os.environ["RANK"]).mkdir()
    os.chdir(Path(folder, os.environ["RANK"]))
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment("mine")
    mlflow.pytorch.autolog()
    with mlflow.start_run(run_name="named") as run:
        log_all_kinds(run.info.run_id)
        model = mlflow.pytorch.log_model(
            torch.nn.Linear(2, 1), name="model", registered_model_name="registered"
        )
        mlflow.register_model(model.model_uri, "again")
        with mlflow.start_run(nested=True):
            mlflow.log_metric("inner", 1.0)
        assert mlflow.active_run().info.run_id == run.info.run_id
    mlflow.start_run()
    mlflow.end_run()
    mlflow.log_metric("bare", 1.0)
    use_the_client(mlflow.MlflowClient())
    mlflow.MlflowClient("sqlite:///another.db").create_run("0")
    return sorted(os.listdir())


def log_all_kinds(run_id: str) -> None:
    import mlflow

    mlflow.log_metric("loss", 1.0, step=1)
    mlflow.log_metric("late", 1.0, synchronous=False).wait()
    mlflow.log_metrics({"a": 1.0})
    mlflow.log_param("p", 1)
    mlflow.log_params({"q": 2})
    mlflow.set_tags({"t": "v"})
    mlflow.log_text("text", "a.txt")
    mlflow.log_dict({"a": 1}, "a.json")
    mlflow.log_table({"a": [1]}, "table.json")
    mlflow.log_artifact(__import__("torch").__file__)
    assert mlflow.get_run(run_id).info.run_id == run_id


def use_the_client(client: Any) -> None:
    run_id = client.create_run(client.create_experiment("new")).info.run_id
    client.log_metric(run_id, "a", 1.0)
    client.log_batch(run_id)
    client.set_tag(run_id, "t", "v")
    client.set_terminated(run_id)
    assert list(client.search_runs(["0"])) == []


def test_a_server_that_is_gone_at_the_start_turns_mlflow_off(
    distribute: Distribute, gone: str, warned: Callable[[], list[str]], tmp_path: Path
) -> None:
    """MLflow itself would try for minutes in each rank, and then end the training."""
    assert distribute(2, timeout=90).run_all(use_all_of_it, gone, str(tmp_path)) == [[], []]
    [warning] = warned()
    assert f"The MLflow server at {gone} cannot be reached, so this run is not tracked" in warning


@pytest.mark.slow
def test_lightning_logs_to_nowhere_if_mlflow_is_off(gone: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning")

    def fit() -> None:
        import lightning
        import mlflow
        from lightning.pytorch.demos.boring_classes import BoringModel
        from lightning.pytorch.loggers import MLFlowLogger

        mlflow.pytorch.autolog()
        logger = MLFlowLogger("mine", tracking_uri=gone, log_model=True)
        logger.log_hyperparams({"lr": 0.1})
        options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "log_every_n_steps": 1}
        lightning.Trainer(
            default_root_dir=tmp_path, max_epochs=1, limit_train_batches=2, logger=logger, **options
        ).fit(BoringModel())

    TorchDistributor(2, use_gpu=False, timeout=120).run(fit)


class Refusing(http.server.BaseHTTPRequestHandler):
    """A server that lets one user in, of whom it has no runs."""

    def do_GET(self) -> None:
        expected = "Basic " + base64.b64encode(b"ada:secret").decode()
        self.send_error(404 if self.headers.get("Authorization") == expected else 401)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


def test_refused_credentials_are_an_error_before_launching(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as refusing:
        threading.Thread(target=refusing.serve_forever, daemon=True).start()
        uri = f"http://127.0.0.1:{refusing.server_port}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(DistributorError, match=r"refuses the credentials.*_PASSWORD"):
            TorchDistributor(1, use_gpu=False).run(print)
        refusing.shutdown()
