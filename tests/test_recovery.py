"""The loss of ranks with recovery="in_place": no step is lost, the others go on, and new ones join.

RECOVERY_TIMES=200 makes 200 trainings with random kills of each kind, instead of 2.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support import process_launcher, survivors
from support.process_launcher import ProcessLauncher
from support.survivors import PAUSE, Fault, check, records_in, train_on
from support.waiting import until

from distributor import DeepspeedTorchDistributor, TorchDistributor
from distributor._compat.torch import OPTIMIZER_IMPORTS
from distributor.node.process.supervisor import is_supported
from distributor.train import FailureConfig, RunConfig, ScalingConfig
from distributor.train.torch import TorchTrainer

cloudpickle.register_pickle_by_value(survivors)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.skipif(not is_supported(), reason="only Linux has supervisors")
TIMES = int(os.environ.get("RECOVERY_TIMES", "2"))
RECOVERY: dict[str, Any] = {"recovery": "in_place", "max_failures": 2, "timeout": 120}
WARM: dict[str, Any] = {"warm": True, "preload": OPTIMIZER_IMPORTS}


def runner(ranks: int, **settings: Any) -> TorchDistributor:
    local: dict[str, Any] = {"local_mode": True, "use_gpu": False}
    return TorchDistributor(ranks, **local | RECOVERY | WARM | settings)


def check_survivors(folder: Path, values: Sequence[dict[str, Any]], lost: set[int]) -> None:
    """Check that the lost ranks have other processes, and only those."""
    began = {each.number: each.pid for each in reversed(records_in(folder)) if each.step == 0}
    same = {value["number"] for value in values if value["pid"] == began[value["number"]]}
    assert same == began.keys() - lost


@pytest.mark.parametrize(
    ("ranks", "faults"),
    [(3, [Fault(0, 18)]), (4, [Fault(1, 18, "step"), Fault(2, 18)])],
    ids=["rank-0", "two-at-once"],
)
def test_the_others_go_on_and_new_processes_join(
    tmp_path: Path, ranks: int, faults: list[Fault]
) -> None:
    values = runner(ranks).run_all(train_on, tmp_path, faults, epochs=4, size=ranks)

    assert [value["number"] for value in values] == list(range(ranks))
    check_survivors(tmp_path, values, {fault.number for fault in faults})
    sizes = [size for size, _ in itertools.groupby(map(len, check(tmp_path, values)))]
    assert sizes[0] == sizes[-1] == ranks
    assert ranks - len(faults) in sizes


def test_an_exception_is_shown_once_and_the_new_rank_0_returns_the_value(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is raised in the last steps, so that the run ends before another process has joined."""
    value = runner(3).run(train_on, tmp_path, [Fault(0, 26, raises=True)], epochs=4)

    shown = capfd.readouterr()
    assert (value["number"], value["rank"], value["size"]) == (1, 0, 2)
    assert (shown.out + shown.err).count("Traceback (most recent call last)") == 1, shown
    assert "Lost rank 0" in shown.err


def test_reports_and_checkpoints_go_on(tmp_path: Path) -> None:
    """Rank 0, which writes them, is lost between two reports."""
    saved = tmp_path / "saved"
    saved.mkdir()
    trainer = TorchTrainer(
        lambda config: train_on(tmp_path, [Fault(0, 18)], epochs=4, size=3, saved=saved),
        train_loop_config={},
        scaling_config=ScalingConfig(num_workers=3, local_mode=True),
        run_config=RunConfig(
            name="run",
            storage_path=str(tmp_path / "runs"),
            failure_config=FailureConfig(max_failures=1, recovery="in_place"),
            settings={"timeout": 120, **WARM},
        ),
    )
    result = trainer.fit()

    history = check(tmp_path, [result.return_value])
    ends = [
        list(steps)[-1][0] for _, steps in itertools.groupby(history, lambda each: each[0].epoch)
    ]
    found = [
        (each.attempt, each.metrics["epoch"], each.metrics["steps"]) for each in result.reports
    ]
    assert found == [(0, end.epoch, end.step + 1) for end in ends]
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as folder:
        assert Path(folder, "steps").read_text() == str(len(history))


def fit(has_model: bool = True, optimizers: int = 1) -> str:
    """Train, and lose rank 1 in the first attempt; return the attempt."""
    import torch

    from distributor.train.torch import prepare_model

    attempt, model = os.environ["TORCHELASTIC_RESTART_COUNT"], torch.nn.Linear(1, 1)
    wrapped = prepare_model(model) if has_model else model
    made = [torch.optim.SGD(model.parameters(), 0.1) for _ in range(optimizers)]
    for step in range(4):
        wrapped(torch.ones(2, 1)).sum().backward()
        for optimizer in made:
            optimizer.step()
        if attempt + os.environ["RANK"] == "01" and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    return attempt


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"has_model": False}, "no model was given to prepare_model"),
        ({"optimizers": 2}, "there are two optimizers"),
    ],
)
def test_all_restart_if_it_does_not_apply(
    warned: Callable[[], list[str]], options: dict[str, Any], reason: str
) -> None:
    assert runner(2).run_all(fit, **options) == ["1", "1"]
    assert [each for each in warned() if "recovery" in each] == [
        f"recovery='in_place' does not apply: {reason}. A failure restarts all ranks from the "
        "latest checkpoint."
    ]


def test_it_is_refused_with_deepspeed() -> None:
    with pytest.raises(ValueError, match="recovery must be 'restart' with DeepSpeed"):
        DeepspeedTorchDistributor(2, useGpu=False, recovery="in_place", max_failures=1)


def killed_soon(number: int, step: int, later: float = 0.0) -> Fault:
    return Fault(number, step, delay=random.uniform(0, 5 * PAUSE) + later)


def faults_of(kind: str) -> list[Fault]:
    """Return faults at random moments: of one rank, of two at once, or one during the forming."""
    step, (one, other) = random.randint(10, 30), random.sample(range(4), 2)
    if kind.isdigit():
        return [killed_soon(int(kind), step)]
    if kind == "two at once":
        return [killed_soon(one, step), killed_soon(other, step)]
    return [killed_soon(one, step), killed_soon(other, step, random.uniform(0.0, 0.06))]


random_kills = pytest.mark.parametrize(
    "kind", ["0", "1", "2", "3", "two at once", "during the forming"]
)


def check_random_kills(run: Callable[..., Any], folder: Path, kind: str) -> None:
    for turn in range(TIMES):
        faults, here = faults_of(kind), folder / str(turn)
        here.mkdir()
        values = run(partial(train_on, here, faults, epochs=8, size=4))
        try:
            check_survivors(here, values, {fault.number for fault in faults})
            check(here, values)
        except AssertionError as error:
            error.add_note(f"{faults} in {here}")
            raise


@pytest.mark.slow
@random_kills
@pytest.mark.timeout(60 * TIMES + 60)
def test_random_kills_on_two_nodes(tmp_path: Path, kind: str) -> None:
    launcher = ProcessLauncher(ranks_per_node=2)
    run = partial(process_launcher.distribute, launcher, 4, **RECOVERY, **WARM)
    check_random_kills(run, tmp_path, kind)


@pytest.mark.slow
@random_kills
@pytest.mark.timeout(60 * TIMES + 60)
def test_random_kills_on_a_cluster(spark: Any, tmp_path: Path, kind: str) -> None:
    check_random_kills(runner(4, local_mode=False).run_all, tmp_path, kind)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(TIMES))
def test_all_restart_after_the_loss_of_a_node(tmp_path: Path, turn: int) -> None:
    launcher = ProcessLauncher(ranks_per_node=2)

    def kill() -> None:
        until(lambda: len(records_in(tmp_path)) > 20, "the ranks train", 60)
        time.sleep(random.uniform(0, 0.02))
        launcher.processes[turn % 2].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    train = partial(train_on, tmp_path, epochs=8)
    values = process_launcher.distribute(launcher, 4, train, **RECOVERY, **WARM)
    killer.join()
    assert {len(step) for step in check(tmp_path, values, attempt=1)} == {4}
