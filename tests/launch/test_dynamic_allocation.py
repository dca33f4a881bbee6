"""Sessions whose executors come and go with the load, in driver programs of their own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyspark
import pytest
from support.pages import PAGES, as_script, differences

pytestmark = [pytest.mark.spark, pytest.mark.slow]

RunDriver = Callable[..., subprocess.CompletedProcess[str]]

DYNAMIC = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.initialExecutors": "0",
    "spark.dynamicAllocation.maxExecutors": "3",
    "spark.dynamicAllocation.executorIdleTimeout": "5s",
    "spark.executor.cores": "1",
    "spark.executor.memory": "600m",
}
START = """
import json, os, sys, threading, time

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
from pyspark.sql import SparkSession
from distributor import TorchDistributor
from distributor.settings import Listener

builder = SparkSession.builder.master("local-cluster[3,1,900]")
builder = builder.config("spark.ui.enabled", "false").config("spark.log.level", "OFF")
for key, value in json.loads(sys.argv[1]).items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()

def executors():
    return len(spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()) - 1

def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)

def ranks(number=2, **settings):
    settings = {"start_timeout": 250, "timeout": 250, **settings}
    return TorchDistributor(number, local_mode=False, use_gpu=False, **settings)

def reduce(kill=False):
    import os, signal, time
    import psutil, torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    if kill and attempt == "0":
        dist.barrier()
        if rank == 1:
            # The executor's JVM: a warm process may outlive the Python worker that has started it.
            wanted = {"name": "java", "cwd": os.getcwd()}  # of a zombie, the folder is None
            next(each for each in psutil.process_iter([*wanted]) if each.info == wanted).kill()
        time.sleep(100)
    total = torch.ones(1)
    dist.all_reduce(total)
    return [int(total), attempt, os.getpid()]

def error_of(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return [type(error).__name__, str(error)]

facts = {}
"""


def facts_of(
    run_driver: RunDriver, lines: str, conf: dict[str, str] = DYNAMIC, **environment: str
) -> dict[str, Any]:
    source = START + lines + "\nprint(json.dumps(facts))\nspark.stop()"
    done = run_driver(source, json.dumps(conf), timeout=300, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_executors_come_with_a_run_and_go_after_it(run_driver: RunDriver) -> None:
    lines = """
facts["before"] = executors()
facts["first"] = ranks(3).run(reduce)
facts["during"] = executors()
until(lambda: executors() == 0)
facts["after idling"] = ranks(2).run(reduce)
"""
    found = facts_of(run_driver, lines)
    assert (found["before"], found["during"]) == (0, 3)
    assert [found[name][0] for name in ("first", "after idling")] == [3, 2]


@pytest.mark.slow
def test_executors_come_with_a_study_and_go_after_it(run_driver: RunDriver) -> None:
    """A trial waits for slots on a cluster that never has as many as Spark may ask for."""
    pytest.importorskip("optuna")
    lines = """
import optuna
from distributor.tune import optimize
study, counts = optuna.create_study(), []
count = lambda *_: counts.append(executors())
optimize(study, lambda: 1, lambda _: (), ranks(), n_trials=4, callbacks=[count])
facts["states"] = [trial.state.name for trial in study.trials]
facts["came"] = max(counts) >= 2
until(lambda: executors() == 0)
"""
    found = facts_of(run_driver, lines, DYNAMIC | {"spark.dynamicAllocation.maxExecutors": "9"})
    assert found == {"states": ["COMPLETE"] * 4, "came": True}


def test_the_programs_of_the_page(run_driver: RunDriver) -> None:
    page = PAGES / "how-to" / "dynamic-allocation.md"
    done = run_driver(f"{START}\n{as_script(page)}\nspark.stop()", json.dumps(DYNAMIC))
    assert differences(page, done.stdout) == []


@pytest.mark.slow(ci=True)
def test_a_lost_executor_is_replaced_or_a_pair_goes_on_without_it(run_driver: RunDriver) -> None:
    lines = """
facts["all"] = ranks(3, max_failures=1).run_all(reduce, True)
facts["pair"] = ranks((2, 3), max_failures=1).run_all(reduce, True)
facts["error"] = error_of(ranks(2).run, reduce, True)
"""
    found = facts_of(run_driver, lines)
    assert [rank[:2] for rank in found["all"]] == [[3, "1"]] * 3
    assert found["pair"][0][0] in (2, 3)
    assert found["pair"][0][1] == "1"
    kind, message = found["error"]
    assert kind == "NodeLost"
    assert "executor" in message


@pytest.mark.slow
def test_ranks_join_and_leave_while_the_others_train(run_driver: RunDriver, tmp_path: Path) -> None:
    """The third executor is busy at first; later, the first one is decommissioned."""
    lines = f"""
folder = {str(tmp_path)!r}

def train(folder):
    import torch
    import torch.distributed as dist
    from distributor.train.torch import State, prepare_model
    model = prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    number, state = os.environ["RANK"], State(sizes=[], steps=0)
    with open(os.path.join(folder, number), "w") as file:
        file.write(str(os.getpid()))
    while len(state.sizes) < 4:
        optimizer.zero_grad()
        model(torch.ones(2, 1)).sum().backward()
        optimizer.step()
        state.steps += 1
        if state.sizes[-1:] != [dist.get_world_size()]:
            state.sizes = [*state.sizes, dist.get_world_size()]
            if len(state.sizes) == 2 and dist.get_rank() == 0:
                open(os.path.join(folder, "grown"), "w").close()
        time.sleep(0.01)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    return [state.sizes, state.steps, attempt, model.module.weight.item()], os.getpid()

def decommission():
    import psutil, signal
    until(lambda: os.path.exists(os.path.join(folder, "grown")))
    parents = psutil.Process(int(open(os.path.join(folder, "0")).read())).parents()
    executor = next(each for each in parents if "CoarseGrainedExecutor" in " ".join(each.cmdline()))
    executor.send_signal(signal.SIGPWR)
    facts["left"] = True

def occupy(rows):
    time.sleep(30)
    yield from rows

busy = threading.Thread(target=spark.range(0, 1, 1, 1).rdd.mapPartitions(occupy).count)
busy.start()
until(lambda: executors() == 1)
threading.Thread(target=decommission).start()
values = ranks((2, 3), recovery="in_place", max_failures=1).run_all(train, folder)
facts["same"] = all(value[0] == values[0][0] for value in values)
facts["value"], facts["ranks"] = values[0][0], len(values)
"""
    found = facts_of(run_driver, lines, DYNAMIC | {"spark.decommission.enabled": "true"})
    sizes, steps, attempt, _ = found.pop("value")
    assert (sizes, attempt) == ([2, 3, 2, 3], "0")
    assert steps > 100
    assert found == {"left": True, "same": True, "ranks": 3}


def test_what_cannot_run_is_refused(run_driver: RunDriver) -> None:
    lines = """
facts["barrier"] = error_of(ranks, 2, barrier=True)
facts["too many"] = error_of(ranks(4).run, reduce)
facts["executors"] = executors()
"""
    found = facts_of(run_driver, lines)
    kind, message = found["barrier"]
    assert kind == "RuntimeError"
    assert "barrier is True, but 'spark.dynamicAllocation.enabled' is 'true'" in message
    kind, message = found["too many"]
    assert kind == "DistributorError"
    assert "4 tasks are wanted at once" in message
    assert "'spark.dynamicAllocation.maxExecutors' is 3" in message
    assert found["executors"] == 0, "nothing was launched"


def test_a_run_brings_executors_with_gpus_and_ends_them(
    run_driver: RunDriver, make_discovery_script: Callable[..., str]
) -> None:
    if int(pyspark.__version__.split(".")[0]) < 4:
        pytest.skip("resource profiles need PySpark 4")
    lines = """
resources = {
    "spark.executor.resource.gpu.amount": 2,
    "spark.executor.resource.gpu.discoveryScript": os.environ["SCRIPT"],
    "spark.executor.memory": "700m",
}

def gpus():
    import os
    return os.environ["CUDA_VISIBLE_DEVICES"]

def run(number, use_gpu=True, **settings):
    settings = {"start_timeout": 100, "timeout": 100, "executor_resources": resources, **settings}
    return TorchDistributor(number, local_mode=False, use_gpu=use_gpu, **settings).run_all(gpus)

facts["gpus"] = run(4)
facts["too many"] = error_of(run, 8)
facts["on cpus"] = error_of(run, 2, False)
"""
    script = make_discovery_script("0", "1")
    conf = DYNAMIC | {
        "spark.worker.resource.gpu.amount": "2",
        "spark.worker.resource.gpu.discoveryScript": script,
    }
    found = facts_of(run_driver, lines, conf, SCRIPT=script)
    assert found["gpus"] == ["0,1"] * 4
    assert "4 tasks are wanted at once" in found["too many"][1]
    assert "the ranks run on CPUs: leave it out" in found["on cpus"][1]


def test_a_fraction_of_a_gpu_for_each_task_does_not_make_ranks_share_them(
    run_driver: RunDriver, make_discovery_script: Callable[..., str]
) -> None:
    lines = """
def gpus():
    return os.environ["CUDA_VISIBLE_DEVICES"]

run = TorchDistributor(4, local_mode=False, timeout=200)
facts["gpus"] = run.run_all(gpus)
"""
    script = make_discovery_script("0", "1")
    conf = DYNAMIC | {"spark.task.resource.gpu.amount": "0.25"}
    for kind in ("worker", "executor"):
        conf[f"spark.{kind}.resource.gpu.amount"] = "2"
        conf[f"spark.{kind}.resource.gpu.discoveryScript"] = script
    assert facts_of(run_driver, lines, conf)["gpus"] == ["0,1"] * 4, "two tasks of two ranks"


def test_a_pair_grows_at_a_checkpoint(run_driver: RunDriver, tmp_path: Path) -> None:
    lines = """
folder = os.environ["FOLDER"]

def hold():
    import os, time
    while not os.path.exists(os.path.join(folder, "enough")):
        time.sleep(0.05)

def grow():
    import os, pathlib, tempfile, time
    from distributor import train
    size, attempt = int(os.environ["WORLD_SIZE"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    pathlib.Path(folder, "began").touch()
    checkpoint, step = train.get_checkpoint(), 0
    if checkpoint:
        with checkpoint.as_directory() as saved:
            step = int(pathlib.Path(saved, "step").read_text())
    resumed, deadline = step, time.monotonic() + 90
    while size < 3 and time.monotonic() < deadline:
        step += 1
        time.sleep(0.2)
        with tempfile.TemporaryDirectory() as made:
            pathlib.Path(made, "step").write_text(str(step))
            train.report({"step": step}, checkpoint=train.Checkpoint.from_directory(made))
    return [size, attempt, resumed]

class Failures(Listener):
    failures = 0

    def failed(self, attempt, error):
        self.failures += 1

failures = Failures()
held = ranks(1).submit(hold)
until(lambda: executors() == 1)
grown = ranks((2, 3), storage_path=folder + "/runs", listeners=[failures]).submit_all(grow)
until(lambda: os.path.exists(folder + "/began"))
facts["sizes"] = [executors()]
open(folder + "/enough", "w").close()
held.result()
facts["grown"] = grown.result()
facts["failures"] = failures.failures
"""
    found = facts_of(run_driver, lines, FOLDER=str(tmp_path))
    assert found["sizes"] == [3], "one of them is the other run's"
    size, attempt, resumed = found["grown"][0]
    assert (size, attempt, found["failures"]) == (3, "1", 0)
    assert resumed > 0, "the second attempt continues from a checkpoint of the first"
