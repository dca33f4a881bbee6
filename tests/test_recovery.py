"""The loss of ranks with recovery="in_place": no step is lost, the others go on, and new ones join.

RECOVERY_TIMES=200 makes 200 random kills of each kind, instead of 10, and one tenth of that on a
cluster.
"""

from __future__ import annotations

import itertools
import math
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
import torch
from support import process_launcher, survivors
from support.process_launcher import ProcessLauncher
from support.survivors import (
    BATCH,
    NUM_PRINTED,
    PAUSE,
    ROWS,
    STEPS_OF_REPORT,
    Fault,
    check,
    records_in,
    train_on,
)
from torch.utils.data import DataLoader

from distributor import DeepspeedTorchDistributor, TorchDistributor
from distributor._compat.torch import OPTIMIZER_IMPORTS
from distributor.node.process.supervisor import is_supported
from distributor.train import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    collective,
    report,
)
from distributor.train.torch import State, TorchTrainer, prepare_data_loader, prepare_model

cloudpickle.register_pickle_by_value(survivors)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.skipif(not is_supported(), reason="only Linux has supervisors")
TIMES = int(os.environ.get("RECOVERY_TIMES", "10"))
ON_CLUSTER = -(-TIMES // 10)
TOGETHER = 20
"""Kills in one training."""
SPACING = 60
"""Steps from one kill to the next, in which replacements join."""
RECOVERY: dict[str, Any] = {"recovery": "in_place", "max_failures": 2, "timeout": 120}
NODE, EXECUTOR = "support.process_launcher", "CoarseGrainedExecutorBackend"
LOSS = Fault(1, 10)
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
    run = runner(ranks, max_failures=1)  # ranks of a host that are lost together are one loss
    values = run.run_all(train_on, tmp_path, faults, epochs=4, size=ranks)

    assert [value["number"] for value in values] == list(range(ranks))
    check_survivors(tmp_path, values, {fault.number for fault in faults})
    sizes = [size for size, _ in itertools.groupby(map(len, check(tmp_path, values)))]
    assert sizes[0] == sizes[-1] == ranks
    assert ranks - len(faults) in sizes


def test_the_others_do_not_wait_until_the_kernel_has_ended_a_process(
    tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    """But its replacement does, which needs its memory."""
    values = runner(3).run_all(train_on, tmp_path, [Fault(1, 18, lingers=0.5)], epochs=4, size=3)

    check_survivors(tmp_path, values, {1})
    history, ended = check(tmp_path, values), float((tmp_path / "ended").read_text())
    assert min(step[0].at for step in history if len(step) == 2) < ended
    [new] = {value["pid"] for value in values if value["number"] == 1}
    assert min(each.at for each in records_in(tmp_path) if each.pid == new) > ended
    assert "WorkerDied: exited with code 3" in str(warned())


def test_the_batch_of_all_ranks_can_stay_as_large(tmp_path: Path) -> None:
    train = partial(train_on, tmp_path, [Fault(1, 8)], epochs=4, size=3, keep_global_batch=True)
    values = runner(3).run_all(train)

    history = check(tmp_path, values)
    assert {len(step) for step in history} >= {2, 3}
    for step, after in itertools.pairwise(history):
        if (step[0].epoch, step[0].size) == (after[0].epoch, after[0].size):  # not a rest
            assert sum(len(each.rows) for each in step) == 3 * BATCH


def test_gradients_are_accumulated(tmp_path: Path) -> None:
    train = partial(train_on, tmp_path, [Fault(0, 18)], epochs=8, size=3, accumulates=True)
    check(tmp_path, runner(3).run_all(train), accumulates=True)


def test_an_exception_is_shown_once_and_the_new_rank_0_returns_the_value(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run ends before another process has joined, which waits for the end of the former one."""
    run, logs = runner(3, log_dir=tmp_path / "logs"), tmp_path.glob("logs/*/*/rank0.*")
    value = run.run(train_on, tmp_path, [Fault(0, 26, raises=True, lingers=9.0)], epochs=4)

    shown, logged = capfd.readouterr(), "".join(path.read_text() for path in logs)
    assert logged.count("Traceback (most recent call last)") == 1
    assert logged.count(".") > NUM_PRINTED, "it has printed them before it raised"
    assert (value["number"], value["rank"], value["size"]) == (1, 0, 2)
    assert (shown.out + shown.err).count("Traceback (most recent call last)") == 1, shown
    assert "Lost rank 0" in shown.err


def linear() -> tuple[Any, torch.optim.Optimizer]:
    """Return a prepared model of one weight and one bias, and its optimizer."""
    module = torch.nn.Linear(1, 1)
    return prepare_model(module), torch.optim.SGD(module.parameters(), 0.01)


class Sizes(State):
    """Knows how many ranks there are."""

    def on_members(self, rank: int, size: int) -> None:
        self.size = size


def lose_in_the_last_step(losses: int, late: float) -> Any:
    """Lose a rank in the last step, and maybe another after it, for which rank 0 may be late."""
    module, number = torch.nn.Linear(1, 1), int(os.environ["RANK"])
    model, optimizer = prepare_model(module), torch.optim.Adam(module.parameters())
    state, sizes = Sizes(step=0, size=4), {}
    while state.step < 10:
        loss = model(torch.ones(2, 1)).sum()
        sizes[state.step] = state.size
        if (number, state.step) == (1, 9):
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        state.step += 1
        if (number, state.size, losses) == (2, 3, 2):
            threading.Timer(late / 2, os.kill, [os.getpid(), signal.SIGKILL]).start()
        time.sleep(late if (number, state.size) == (0, 3) else 0)
        collective.barrier()
    return {int(each["step"]) for each in optimizer.state.values()}, list(sizes.values())


@pytest.mark.parametrize(("losses", "left", "late"), [(1, 3, 0), (2, 2, 0), (2, 2, 0.3)])
def test_no_step_is_left_out_at_the_end(losses: int, left: int, late: float) -> None:
    expected = {10}, [4] * 9 + [left]
    assert runner(4).run_all(lose_in_the_last_step, losses, late) == left * [expected]


class Phases(State):
    """Ends with the epoch in which there are as many ranks again."""

    def on_members(self, rank: int, size: int) -> None:
        self.end = self.epoch + 1 if size == 3 else math.inf


def train_in_phases(folder: Path) -> Any:
    """Train on a loader, and then on another one; two ranks raise the same at other steps."""
    module = torch.nn.Linear(1, 1)
    model, state = prepare_model(module), Phases(epoch=0, step=0, end=math.inf, f=lambda: 0)
    optimizer, number = torch.optim.SGD(module.parameters(), 0.01), int(os.environ["RANK"])
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, min_lr=1e-4)
    first, second = (
        prepare_data_loader(DataLoader(torch.rand(rows, 1), batch_size=2)) for rows in (12, 120)
    )
    while state.epoch < state.end:
        for x in first if state.epoch == 0 else second:
            loss = (model(x) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            marker = folder / f"raised{number}"
            if (number, state.step) in ((1, 10), (2, 20)) and not marker.exists():
                marker.touch()
                raise OSError("on purpose")
            optimizer.step()
            state.step += 1
            time.sleep(PAUSE)
        schedule.step(1.0)
        state.epoch += 1
    return number, state.step, schedule.state_dict(), module.weight.item()


def test_replacements_follow_loaders_and_schedulers(tmp_path: Path) -> None:
    values = runner(3).run_all(train_in_phases, tmp_path)

    assert [value[0] for value in values] == [0, 1, 2]
    assert values[0][1:] == values[1][1:] == values[2][1:]


def trainer_in(
    folder: Path,
    train: Callable[[], Any],
    ranks: int,
    max_failures: int,
    local_mode: bool = True,
    num_to_keep: int | None = None,
) -> TorchTrainer:
    return TorchTrainer(
        lambda config: train(),
        train_loop_config={},
        scaling_config=ScalingConfig(num_workers=ranks, local_mode=local_mode),
        run_config=RunConfig(
            name="run",
            storage_path=str(folder / "runs"),
            checkpoint_config=CheckpointConfig(num_to_keep=num_to_keep),
            failure_config=FailureConfig(max_failures=max_failures, recovery="in_place"),
            settings={"timeout": 120, **WARM},
        ),
    )


def fit_and_report(
    folder: Path, faults: Sequence[Fault], ranks: int, epochs: int = 4, local_mode: bool = True
) -> None:
    """Train with reports, and check that there is each of them once."""
    saved = folder / "saved"
    saved.mkdir()
    train = partial(train_on, folder, faults, epochs=epochs, size=ranks, saved=saved)
    result = trainer_in(folder, train, ranks, len(faults), local_mode).fit()

    history = check(folder, [result.return_value])
    reported = [step[0] for step in history[STEPS_OF_REPORT - 1 :: STEPS_OF_REPORT]]
    found = [(each.attempt, *each.metrics.values()) for each in result.reports]
    assert found == [(0, each.epoch, each.step + 1) for each in reported]
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as stored:
        assert Path(stored, "steps").read_text() == str(reported[::2][-1].step + 1)


@pytest.mark.parametrize("moment", ["forward", "report"])
def test_reports_and_checkpoints_go_on(tmp_path: Path, moment: str) -> None:
    """Rank 0, which writes them, is lost between two reports, or while others wait for it."""
    fit_and_report(tmp_path, [Fault(0, 18, moment)], 3)


def save_parts(folder: Path) -> None:
    """Report checkpoints of all ranks; rank 1 is lost while rank 0 stores one of them."""
    from distributor.train.storage.checkpoint_manager import CheckpointManager

    (model, optimizer), number, store = linear(), int(os.environ["RANK"]), CheckpointManager.add
    state, part, pid = State(step=0), folder / f"part{number}", folder / "pid"
    kills = [signal.SIGKILL]
    part.mkdir(exist_ok=True)
    if number == 1 and not pid.exists():
        pid.write_text(str(os.getpid()))

    def store_slowly(*args: Any) -> None:
        store(*args)
        if state.step == 3 and kills:
            os.kill(int(pid.read_text()), kills.pop())
            time.sleep(0.5)

    CheckpointManager.add = store_slowly  # type: ignore[method-assign]
    while state.step < 6:
        model(torch.ones(2, 1)).sum().backward()
        optimizer.step()
        state.step += 1
        (part / f"step{number}").write_text(str(state.step))
        report({"step": state.step}, checkpoint=Checkpoint.from_directory(part))


def test_a_checkpoint_stays_that_was_stored_when_a_rank_was_lost(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, partial(save_parts, tmp_path), 3, 1, num_to_keep=1)
    reports = trainer.fit().reports
    assert [each.metrics["step"] for each in reports] == [1, 2, 3, 3, 4, 5, 6]  # 3 is made again
    assert all(each.checkpoint for each in reports)


@pytest.mark.slow
@pytest.mark.spark
def test_reports_and_checkpoints_go_on_without_an_executor(spark: Any, tmp_path: Path) -> None:
    fit_and_report(tmp_path, [Fault(0, 18, above=EXECUTOR)], 4, local_mode=False)


@pytest.mark.slow
@pytest.mark.timeout(5 * TIMES + 120)
def test_random_kills_during_reports(tmp_path: Path) -> None:
    for begin in range(0, TIMES, TOGETHER):
        turns, here = range(min(TOGETHER, TIMES - begin)), tmp_path / str(begin)
        here.mkdir()
        steps = [SPACING * turn + 10 for turn in turns]
        faults = [
            Fault(number, step, "report", random.uniform(0, 0.03))
            for step in steps
            for number in random.sample(range(4), random.choice([1, 1, 2]))
        ]
        epochs = (SPACING * len(turns)) // (ROWS // BATCH // 4) + 4
        fit_and_report(here, faults, 4, epochs)


def train_and_evaluate(folder: Path) -> Any:
    """Train for five steps between evaluations; rank 1 is lost during one, and joins after one."""
    (model, optimizer), state = linear(), State(step=0)
    loader = prepare_data_loader(DataLoader(torch.rand(96, 1), batch_size=2, shuffle=True))
    while state.step < 40:
        for x in loader:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state.step += 1
            if state.step % 5 == 0:
                break
        time.sleep(0.6)
        if (os.environ["RANK"], state.step) == ("1", 10):
            LOSS.inject("forward", folder)
    return loader.sampler.epoch


def test_replacements_are_in_the_pass_of_the_others(tmp_path: Path) -> None:
    assert runner(3).run_all(train_and_evaluate, tmp_path) == [7, 7, 7]


def schedule_otherwise(folder: Path, period: int) -> str:
    """Train with another schedule in the second process of rank 1; return the attempt."""
    attempt, is_second = os.environ["TORCHELASTIC_RESTART_COUNT"], LOSS.marker(folder).exists()
    (model, optimizer), state = linear(), State(step=0)
    period = 500 if attempt == "0" and is_second else period
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / period)
    while state.step < 400:
        model(torch.ones(2, 1)).sum().backward()
        if (os.environ["RANK"], state.step) == ("1", 10):
            LOSS.inject("forward", folder)
        optimizer.step()
        schedule.step()
        state.step += 1
        time.sleep(PAUSE)
    return attempt


@pytest.mark.parametrize(("period", "attempt"), [(500, "0"), (1000, "1")])
def test_a_rank_with_another_schedule_does_not_join(
    tmp_path: Path, period: int, attempt: str
) -> None:
    assert runner(3).run_all(schedule_otherwise, tmp_path, period) == [attempt] * 3


def fit(
    has_model: bool = True,
    optimizers: int = 1,
    waits: Sequence[int] = (),
    has_loader: bool = False,
) -> str:
    """Train, and lose rank 1 in the first attempt, or rank 0 after a wait; return the attempt."""
    import torch

    from distributor.train.torch import prepare_model

    attempt, model = os.environ["TORCHELASTIC_RESTART_COUNT"], torch.nn.Linear(1, 1)
    wrapped = prepare_model(model) if has_model else model
    made = [torch.optim.SGD(model.parameters(), 0.1) for _ in range(optimizers)]
    if has_loader:
        batches = iter(prepare_data_loader(DataLoader(torch.ones(8, 1))))
        next(batches)
    for step in range(4):
        wrapped(torch.ones(2, 1)).sum().backward()
        for optimizer in made:
            optimizer.step()
        if attempt + os.environ["RANK"] == "01" and step == 2 and not waits:
            os.kill(os.getpid(), signal.SIGKILL)
    if waits:
        time.sleep(waits[int(os.environ["RANK"])])
    if waits and attempt + os.environ["RANK"] == "00":
        os.kill(os.getpid(), signal.SIGKILL)
    return attempt


def lose_connections(waits: Sequence[float]) -> str:
    """Train; rank 1 dies after its wait, and a collective of the program fails in rank 0."""
    attempt, number = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
    model, optimizer = linear()
    for _ in range(2):
        model(torch.ones(2, 1)).sum().backward()
        optimizer.step()
    time.sleep(0 if attempt == "1" else waits[number])
    if (attempt, number) == ("0", 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if (attempt, number) == ("0", 0):
        raise RuntimeError("Connection closed by peer")
    return attempt


@pytest.mark.parametrize("waits", [(1.0, 0.5, 9.0), (0.5, 1.0, 9.0)], ids=["before", "after"])
def test_a_loss_that_restarts_all_counts_once(
    waits: tuple[float, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether the driver learns of it before or after the failure to which it has led."""
    assert runner(3, max_failures=1).run(lose_connections, waits) == "1"
    assert "Failed: attempt 0 on 3 ranks: WorkerDied: rank 1" in capfd.readouterr().err


def refuse_to_join(folder: Path) -> int:
    """Train; the second process of rank 1 refuses to. Return how many processes get to the end."""
    number, (model, optimizer), state = os.environ["RANK"], linear(), State(step=0)
    if number == "1" and LOSS.marker(folder).exists():
        prepare_model(model.module)
    while state.step < 400:
        model(torch.ones(2, 1)).sum().backward()
        if (number, state.step) == ("1", 10):
            LOSS.inject("forward", folder)
        optimizer.step()
        state.step += 1
        time.sleep(PAUSE)
    (folder / f"end.{os.getpid()}").touch()
    time.sleep(1)
    return len(list(folder.glob("end.*")))


def test_a_process_that_cannot_join_does_not_train_alone(tmp_path: Path) -> None:
    assert runner(3).run_all(refuse_to_join, tmp_path) == [2, 2]


def mean_of_halves() -> Any:
    import torch

    from distributor.train.torch import prepare_model

    model = prepare_model(torch.nn.Linear(1, 1, bias=False, dtype=torch.half))
    model(torch.full((1, 1), 40_000, dtype=torch.half)).sum().backward()
    mean = model.module.weight.grad.item()
    model.zero_grad()
    model.require_backward_grad_sync = False
    model(torch.full((1, 1), float(os.environ["RANK"]), dtype=torch.half)).sum().backward()
    return mean, model.module.weight.grad.item()


def test_gradients_are_averaged_without_overflow_and_as_with_ddp() -> None:
    assert runner(2).run_all(mean_of_halves) == [(40_000, 0), (40_000, 1)]


@pytest.mark.parametrize("waits", [(1, 0), (0, 1)], ids=["last", "first"])
def test_all_restart_if_rank_0_is_lost_after_the_training(waits: tuple[int, int]) -> None:
    """What it was to return, or to save, is lost with it."""
    assert runner(2).run(fit, waits=waits) == "1"


def test_a_rank_that_hangs_is_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train = partial(train_on, tmp_path, [Fault(1, 18, hangs=True)], epochs=8, size=3)
    values = runner(3, stall_timeout=1).run_all(train)

    check_survivors(tmp_path, values, {1})
    check(tmp_path, values)
    shown = capfd.readouterr()
    assert "it hung for 1 s (stall_timeout) in inject (survivors.py:" in shown.err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"has_model": False}, "no model was given to prepare_model"),
        ({"optimizers": 2}, "there are two optimizers"),
        ({"has_loader": True}, "a batch of prepare_data_loader has several steps of the optimizer"),
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


def killed_soon(number: int, step: int, later: float = 0.0, above: str = "") -> Fault:
    return Fault(number, step, delay=random.uniform(0, 5 * PAUSE) + later, above=above)


def faults_of(kind: str, turn: int) -> list[Fault]:
    """Return faults at random moments: of one rank, of two at once, or one during the forming."""
    step, (one, other) = SPACING * turn + random.randint(10, 30), random.sample(range(4), 2)
    if kind.isdigit() or kind == "accumulates":
        return [killed_soon(int(kind) if kind.isdigit() else one, step)]
    if kind == "two at once":
        return [killed_soon(one, step), killed_soon(other, step)]
    return [killed_soon(one, step), killed_soon(other, step, random.uniform(0.0, 0.06))]


random_kills = pytest.mark.parametrize(
    "kind", ["0", "1", "2", "3", "two at once", "during the forming", "accumulates"]
)


def check_random_kills(run: Callable[..., Any], folder: Path, kind: str, times: int) -> None:
    for begin in range(0, times, TOGETHER):
        turns, here = range(min(TOGETHER, times - begin)), folder / str(begin)
        faults = [fault for turn in turns for fault in faults_of(kind, turn)]
        here.mkdir()
        epochs = (SPACING * len(turns)) // (ROWS // BATCH // 4) + 4
        accumulates = kind == "accumulates"
        train = partial(train_on, here, faults, epochs=epochs, size=4, accumulates=accumulates)
        values = run(train)
        try:
            done = len(list(here.glob("fault.*")))
            assert done > 0.8 * len(faults), "replacements had joined before their own faults"
            check_survivors(here, values, {fault.number for fault in faults})
            check(here, values, accumulates)
        except AssertionError as error:
            error.add_note(f"{faults} in {here}")
            raise


@pytest.mark.slow
@random_kills
@pytest.mark.timeout(5 * TIMES + 120)
def test_random_kills_on_two_nodes(tmp_path: Path, kind: str) -> None:
    launcher = ProcessLauncher(ranks_per_node=2)
    settings = RECOVERY | WARM | {"max_failures": 2 * TOGETHER}
    run = partial(process_launcher.distribute, launcher, 4, **settings)
    check_random_kills(run, tmp_path, kind, TIMES)


@pytest.mark.slow
@random_kills
@pytest.mark.timeout(5 * TIMES + 120)
def test_random_kills_on_a_cluster(spark: Any, tmp_path: Path, kind: str) -> None:
    runs = runner(4, local_mode=False, max_failures=2 * TOGETHER)
    check_random_kills(runs.run_all, tmp_path, kind, ON_CLUSTER)


def test_the_others_go_on_without_the_first_node(
    tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    """It has rank 0, and has served the store."""
    train = partial(train_on, tmp_path, [Fault(0, 18, above=NODE)], epochs=8)
    launcher = ProcessLauncher(replaces=False)
    values = process_launcher.distribute(launcher, 3, train, **RECOVERY)

    assert [(value["number"], value["rank"]) for value in values] == [(1, 0), (2, 1)]
    check_survivors(tmp_path, values, {0})
    check(tmp_path, values)
    [warning] = [each for each in warned() if "went on without" in each]
    assert "rank 0 (local rank 0) on host0, attempt 0: The process of node 0 ended" in warning


@pytest.mark.slow
@pytest.mark.timeout(60 * TIMES + 60)
def test_random_kills_of_a_node(tmp_path: Path) -> None:
    for turn in range(TIMES):
        node = turn % 2
        folder = tmp_path / str(turn)
        folder.mkdir()
        faults = [killed_soon(2 * node + random.randrange(2), 18, above=NODE)]
        train = partial(train_on, folder, faults, epochs=8, size=4)
        launcher = ProcessLauncher(ranks_per_node=2)
        values = process_launcher.distribute(launcher, 4, train, **RECOVERY, **WARM)
        check_survivors(folder, values, {2 * node, 2 * node + 1})
        check(folder, values)


@pytest.mark.slow(ci=True)
@pytest.mark.spark
@pytest.mark.timeout(60 * TIMES + 60)
def test_random_kills_of_an_executor(spark: Any, tmp_path: Path) -> None:
    for turn in range(ON_CLUSTER):
        folder = tmp_path / str(turn)
        folder.mkdir()
        faults = [Fault(random.randrange(4), random.randint(10, 30), above=EXECUTOR)]
        train = partial(train_on, folder, faults, epochs=8, size=4)
        values = runner(4, local_mode=False, max_failures=1).run_all(train)
        pids = {each.number: each.pid for each in reversed(records_in(folder))}
        lost = {value["number"] for value in values if value["pid"] != pids[value["number"]]}
        assert len(lost) == 2
        check(folder, values)
