"""The report of a run: its event log, how its time was spent, its verdict, and its page."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from conftest import cluster_is_slow
from support.driver_process import driver, read_pids
from support.ranks import Distribute
from support.reports import save
from support.training import here
from support.waiting import assert_gone, until

import distributor
from distributor import RunStalled, TorchDistributor, runtime, train
from distributor.cli import main
from distributor.control.attempts import execute
from distributor.core.addresses import host_name
from distributor.core.text import MASK
from distributor.report.event_log import SUFFIX, VERSION, remove_oldest
from distributor.report.runs import list_runs
from distributor.report.verdict import Verdict
from distributor.torch_distributor import prepare_run
from distributor.train import FailureConfig, RunConfig
from distributor.train.torch import TorchTrainer

cloudpickle.register_pickle_by_value(sys.modules[__name__])
SECRET = "hunter2-hunter2"
STEPS, SLOW, LONG = 60, 0.04, 0.2
"""Steps, and seconds that are added to each: to those of all ranks, or of one."""
MIN_SECONDS = 2.0
"""A shorter run than users have is long enough for a verdict."""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the runs of one test, which does not exist yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("distributor.report.verdict.MIN_SECONDS", MIN_SECONDS)
    return tmp_path / "state" / "distributor" / "runs"


def local(num_processes: int = 2, **settings: Any) -> TorchDistributor:
    return TorchDistributor(num_processes, use_gpu=False, **settings)


def report(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    """Return what ``distributor report --json`` prints."""
    capsys.readouterr()
    assert main(["report", "--json", *args]) == 0
    return json.loads(capsys.readouterr().out)


def check_sums(summary: Any) -> None:
    """Check that each second of each rank is in one bucket."""
    for rank in summary["ranks"]:
        assert min(rank["seconds"].values()) >= 0
        assert sum(rank["seconds"].values()) == pytest.approx(summary["seconds"], abs=0.1)


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that take some seconds each."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.ones(4)


class SlowState:
    """Takes some seconds to be saved."""

    def __reduce__(self) -> Any:
        time.sleep(SLOW)
        return int, ()


def learn(cause: str, kind: str = "") -> None:
    """Train with something slow: data or checkpoints of all ranks, or the steps of rank 1."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    dist.init_process_group("gloo")
    model: Any = torch.nn.Linear(4, 1)
    if kind == "FSDP2":
        from torch.distributed.fsdp import fully_shard  # not in torch 2.5

        fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    if kind == "hook":
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    is_slow = dist.get_rank() == 1
    pulses = "while kill -STOP $0; do sleep 0.5; kill -CONT $0; sleep 0.5; done"
    stops = is_slow and cause == "stopped"
    child = subprocess.Popen(["sh", "-c", pulses, str(os.getpid())]) if stops else None
    for step, batch in enumerate(torch.utils.data.DataLoader(Samples(SLOW * (cause == "data")))):
        time.sleep(SLOW if cause == "stopped" else 0.005)
        if cause == "compute" and is_slow:
            compute(2 * SLOW)
        if kind == "accumulation":
            with model.no_sync():
                model(batch).sum().backward()
        model(batch).sum().backward()
        optimizer.step()
        if cause == "checkpoint":
            torch.save(SlowState(), io.BytesIO())
        runtime.progress(step + 1, STEPS, loss=1 / (step + 1))
    if child:
        child.kill()


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@cluster_is_slow
def test_a_slow_rank_is_named(
    distribute: Distribute, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    future = distribute(2).submit(learn, "compute")
    future.result()
    shown = capsys.readouterr().err
    page = future.save_page(tmp_path / "page.html")
    summary = report(capsys)
    assert page.summary == summary
    check_sums(summary)
    verdict = Verdict(**summary["verdict"])
    host = summary["ranks"][1]["host"]  # on a cluster it may be an address
    assert (verdict.verdict, verdict.rank, verdict.host) == ("straggler", 1, host)
    assert host == host_name() or summary["where"]["mode"] != "local"
    # On a busy machine it waits for a CPU for longer than it computes.
    assert re.search("by its CPU time|other processes use its CPUs", verdict.why)
    assert str(verdict) in shown
    assert f"Rank 1 on {host}: the other ranks wait" in page.path.read_text()
    fast, slow = (rank["seconds"] for rank in summary["ranks"])
    assert fast["wait"] > STEPS * SLOW > slow["wait"]
    assert slow["compute"] > STEPS * 2 * SLOW > fast["compute"]
    assert [rank["steps"] for rank in summary["ranks"]] == [STEPS, STEPS]
    assert summary["metrics"]["loss"][-1][1] == pytest.approx(1 / STEPS)
    [log] = runs.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (runs, log)] == [0o700, 0o600]


@pytest.mark.parametrize(
    ("cause", "bucket", "verdict"),
    [
        ("data", "data", "input-bound"),
        ("checkpoint", "checkpoint", "checkpoint-bound"),
        pytest.param("stopped", "stall", "straggler", marks=pytest.mark.slow),
    ],
)
def test_what_is_slow_is_in_its_bucket(
    runs: Path, capsys: pytest.CaptureFixture[str], cause: str, bucket: str, verdict: str
) -> None:
    local().run(learn, cause)
    summary = report(capsys)
    check_sums(summary)
    assert summary["verdict"]["verdict"] == verdict
    first, second = (rank["seconds"][bucket] for rank in summary["ranks"])
    if cause == "stopped":
        assert (summary["verdict"]["rank"], first) == (1, 0.0)
        assert "Its process was stopped" in summary["verdict"]["why"]
        assert 1 < second < summary["seconds"] * 0.6
    else:
        assert STEPS * SLOW <= min(first, second) <= max(first, second) < 1.5 * STEPS * SLOW


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hook", "accumulation", "FSDP2"])
def test_waiting_is_known_of_ddp(runs: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    if kind == "FSDP2" and not hasattr(import_module("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip(f"torch {torch.__version__} has no public FSDP2")
    local().run(learn, "compute", kind)
    summary = report(capsys)
    check_sums(summary)
    verdict, waits = summary["verdict"], [rank["seconds"]["wait"] for rank in summary["ranks"]]
    if kind == "FSDP2":
        assert (verdict["verdict"], waits) == ("healthy", [0.0, 0.0])
        assert summary["unseen"][0].startswith("Waiting for other ranks is in compute")
    else:
        assert (verdict["verdict"], verdict["rank"]) == ("straggler", 1)
        assert waits[0] > STEPS * SLOW > waits[1]


def learn_and_die(config: dict[str, str]) -> None:
    """Train, with a checkpoint after every tenth step; rank 1 is killed once, six steps later."""
    found = train.get_checkpoint()
    model = train.torch.prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(20 if found else 0, 30):
        time.sleep(0.1)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        if step % 10 == 9:
            train.report(
                {"loss": 1 / step}, checkpoint=save(Path(config["folder"], str(step)), "saved")
            )
        if step == 25 and not found and runtime.get_global_rank() == 1:
            print(os.environ["MY_TOKEN"], flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def test_work_that_is_done_again_is_lost(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TorchTrainer(
        learn_and_die,
        train_loop_config={"folder": str(tmp_path / "saved")},
        scaling_config=here(2),
        run_config=RunConfig(
            storage_path=tmp_path / "storage",
            failure_config=FailureConfig(max_failures=1),
            settings={"timeout": 120, "env": {"MY_TOKEN": SECRET}},
        ),
    ).fit()
    summary = report(capsys, "-o", str(tmp_path / "page.html"))
    check_sums(summary)
    assert [attempt["state"] for attempt in summary["attempts"]] == ["failed", "finished"]
    failures = {failure["rank"]: failure["summary"] for failure in summary["failures"]}
    assert "SIGKILL" in failures[1]
    assert len(summary["checkpoints"]) == 3
    for rank in summary["ranks"]:
        seconds = rank["seconds"]
        assert 0.9 * 0.6 <= seconds["lost"] < (seconds["compute"] + seconds["wait"]) / 2
        assert seconds["recovery"] > 0 < seconds["checkpoint"]
    [log] = runs.iterdir()
    assert MASK in log.read_text()
    assert not any(SECRET in path.read_text() for path in (log, tmp_path / "page.html"))


def hang() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        read_batch()
    dist.barrier()


def read_batch() -> None:
    import threading

    threading.Event().wait()


def test_a_stalled_run_names_the_rank_and_its_line(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunStalled):
        local(stall_timeout=2, log_dir=tmp_path / "logs").run(hang)
    shown = capsys.readouterr().err
    summary = report(capsys)
    check_sums(summary)
    verdict = Verdict(**summary["verdict"])
    assert (verdict.verdict, verdict.rank) == ("stalled", 1)
    assert "it is in wait, called by read_batch (test_report.py:" in verdict.why
    assert str(verdict) in shown
    assert all(rank["seconds"]["stall"] >= 2 for rank in summary["ranks"])

    # The log is beside the ranks' output, and nothing is removed there.
    [link] = runs.iterdir()
    log = tmp_path / "logs" / summary["run"] / f"events{SUFFIX}"
    assert (link.name, link.resolve()) == (f"{summary['run']}{SUFFIX}", log)
    remove_oldest(runs, max_runs=1)
    assert list(runs.iterdir()) == []
    assert report(capsys, str(log))["verdict"] == summary["verdict"]


@pytest.mark.parametrize("variables", [{}, {"DISTRIBUTOR_EVENT_LOG": "0"}])
def test_without_a_log_nothing_is_left(
    runs: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    future = local(1, **({} if variables else {"event_log": False})).submit(int)
    assert future.result() == 0
    with pytest.raises(ValueError, match="event_log is off"):
        future.save_page()
    assert not runs.exists()


def test_without_step_times_nothing_is_counted(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert local(1, step_times=False).run(take_a_step) == "stepped"
    summary = report(capsys)
    check_sums(summary)
    assert [rank["steps"] for rank in summary["ranks"]] == [0]
    assert summary["unseen"] == ["Where the time of ranks went is not known: step_times is off."]


def take_a_step() -> str:
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).step()
    return "stepped"


ENDLESS = """
import os, time
from distributor import TorchDistributor

def train():
    print("pid", os.getpid(), flush=True)
    time.sleep(600)

TorchDistributor(1, use_gpu=False).run(train)
"""


def test_a_run_whose_driver_is_killed_is_lost(runs: Path, tmp_path: Path) -> None:
    with driver(ENDLESS, tmp_path) as (process, _):
        [pid] = read_pids(process, 1)
        [run] = list_runs()
        assert (run["state"], run["name"]) == ("running", "train")
        assert distributor.save_page(run["run"], tmp_path / "page.html").summary["ended"] is None
        process.kill()
        assert_gone([pid])
    [run] = list_runs()
    assert run["state"] == "lost"


OF_STEPS = """
import os, time, torch

optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
for step in range(10_000):
    time.sleep(0.02)
    optimizer.step()
    if step == 350:
        print("pid", os.getpid(), flush=True)
"""


@pytest.mark.slow
def test_ctrl_backslash_shows_the_verdict_so_far(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(OF_STEPS)
    source = "from distributor.cli import main; main(['run', '--nproc', '1', '--cpu', 'train.py'])"
    shown: list[str] = []
    with driver(f"{source}  # torch", tmp_path) as (process, _):
        read_pids(process, 1)
        process.send_signal(signal.SIGQUIT)

        def is_shown() -> bool:
            shown.append(capfd.readouterr().err)
            return "Verdict: HEALTHY" in "".join(shown)

        until(is_shown, "the verdict is shown")
    assert "continues" in "".join(shown)


EVENT = {"at": 1.0, "event": "run", "version": VERSION, "run": "a", "name": "train"}
LINE = f"{json.dumps(EVENT)}\n"


@pytest.mark.parametrize(
    ("logs", "run", "message"),
    [
        ({}, [], "There is no run in .* yet"),
        ({"a1": LINE}, ["b"], "There is no run 'b' .* latest are a1"),
        ({"a1": LINE, "a2": LINE}, ["a"], "'a' is the beginning of 2 runs: a2, a1"),
        ({"a": json.dumps({**EVENT, "version": VERSION + 1}) + "\n"}, ["a"], "use a newer one"),
        ({"a": "no log"}, ["a"], "is not the event log of a run"),
        ({"a": None}, ["a"], "events.jsonl cannot be read: Is a directory"),
        ({}, ["./b.jsonl"], "b.jsonl cannot be read: No such file"),
    ],
)
def test_bad_input_is_one_line(
    runs: Path,
    capsys: pytest.CaptureFixture[str],
    logs: dict[str, str | None],
    run: list[str],
    message: str,
) -> None:
    runs.mkdir(parents=True)
    for name, text in logs.items():
        path = runs / f"{name}{SUFFIX}"
        (path / f"events{SUFFIX}").mkdir(parents=True) if text is None else path.write_text(text)
    assert main(["report", *run]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert re.search(message, err)
    assert main(["report", "--list"]) == 0, "one log that cannot be read hides no other"


def test_a_log_may_end_in_the_middle_of_a_line(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.mkdir(parents=True)
    (runs / f"a{SUFFIX}").write_text(LINE + LINE.rstrip())
    assert report(capsys)["state"] == "lost"


def test_a_run_goes_on_without_its_log(
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warned: Callable[[], list[str]],
) -> None:
    run = prepare_run(local(1), False, take_a_step, (), {})
    runs.mkdir(parents=True)
    (runs / f"{run.spec.run_id}{SUFFIX}").symlink_to("/dev/full")
    assert execute(run) == "stepped"
    (tmp_path / "file").touch()  # nothing can be made below it, as in a home that cannot be written
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert local(1).run(take_a_step) == "stepped"
    first, second = warned()
    assert "cannot be written, but the run goes on: [Errno 28] No space left" in first
    assert "cannot be written, but the run goes on: [Errno 20] Not a directory" in second
