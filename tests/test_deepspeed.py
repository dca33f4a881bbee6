"""DeepSpeed trains with ZeRO on the ranks of both of PySpark's classes."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import pytest
import torch
from conftest import cluster_is_slow
from support.pages import PAGES, as_script, differences
from support.ranks import Distribute
from torch.nn.functional import mse_loss

from distributor import DeepspeedTorchDistributor

if find_spec("deepspeed") is None:  # importing it here would only take time
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)
if not (shutil.which("c++") and Path(sysconfig.get_path("include"), "Python.h").is_file()):
    pytest.skip("DeepSpeed needs a C++ compiler and Python.h on CPUs", allow_module_level=True)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS, STEPS, RATE = 16, 30, 0.2
SETTINGS: dict[str, Any] = {
    "timeout": 500,  # for the extension that DeepSpeed compiles at its first start
    "env": {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},  # ninja's
}


@pytest.fixture(scope="module", autouse=True)
def own_extensions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile into a new folder: in the user's, a killed process may have left its lock."""
    folder = tmp_path_factory.mktemp("extensions")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SETTINGS["env"], "TORCH_EXTENSIONS_DIR", str(folder))
        yield


class Report(NamedTuple):
    """What a rank returns about its training."""

    world_size: int
    stage: int
    parameters: list[float]


def config_of(stage: int) -> dict[str, Any]:
    """Return a configuration of DeepSpeed for a stage of ZeRO."""
    return {
        "train_micro_batch_size_per_gpu": ROWS // 2,
        "gradient_clipping": 0.0,  # by default, norms above 1 are clipped
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10 * STEPS,
    }


def points() -> tuple[torch.Tensor, torch.Tensor]:
    """Return points near a plane. Each half of them is near another one."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(ROWS, 3, generator=generator)
    noise = torch.randn(ROWS, 1, generator=generator)
    return x, x @ torch.tensor([[3.0], [-2.0], [1.0]]) + noise


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def flat(model: torch.nn.Module) -> list[float]:
    """Return all parameters of a model as numbers."""
    return torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()


def expected_parameters() -> list[float]:
    """Train on all points in this process, without DeepSpeed."""
    model, (x, y) = new_model(), points()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    return flat(model)


def train(**config: Any) -> Report:
    """Train on this rank's half of the points; `config` is for ``deepspeed.initialize``."""
    import deepspeed

    model = new_model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), **config)
    x, y = (half.chunk(2)[engine.global_rank] for half in points())
    for _ in range(STEPS):
        engine.backward(mse_loss(engine(x), y))
        engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return Report(engine.world_size, engine.zero_optimization_stage(), flat(model))


def train_stages(stages: list[int]) -> list[Report]:
    """Train once with each stage, by a configuration that the function has."""
    return [train(config=config_of(stage)) for stage in stages]


def train_by_command_line() -> Report:
    """Train with the configuration that the command line names, as DeepSpeed's examples do."""
    import argparse

    import deepspeed

    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args()
    assert args.deepspeed
    return train(args=args)


def check(reports: list[Report], stage: int) -> None:
    """Check that two ranks have trained together, as one process would have on all points."""
    assert [(each.world_size, each.stage) for each in reports] == [(2, stage)] * 2
    for report in reports:
        assert report.parameters == pytest.approx(expected_parameters(), abs=1e-4)


@pytest.mark.slow
@cluster_is_slow
def test_every_stage_trains_with_torch_distributor(distribute: Distribute) -> None:
    stages = [1, 2, 3]
    of_ranks = distribute(2, **SETTINGS).run_all(train_stages, stages)
    for stage, reports in zip(stages, zip(*of_ranks, strict=True), strict=True):
        check(list(reports), stage)


@pytest.fixture(
    params=[
        "local",
        pytest.param("cluster", marks=[pytest.mark.slow, pytest.mark.spark(shared=True)]),
    ]
)
def deepspeed(request: pytest.FixtureRequest) -> Callable[..., DeepspeedTorchDistributor]:
    """Make a distributor of two CPU ranks, once per launcher: ``deepspeed(config)``."""
    local_mode = request.param == "local"
    if not local_mode:
        request.getfixturevalue("spark")

    def make(config: Any) -> DeepspeedTorchDistributor:
        shape = (2, 1) if local_mode else (1, 2)
        return DeepspeedTorchDistributor(*shape, local_mode, False, config, **SETTINGS)

    return make


def cases() -> Iterator[Any]:
    for launcher, stage in itertools.product(("local", "cluster"), (1, 2, 3)):
        marks = [pytest.mark.slow]
        marks += [pytest.mark.spark(shared=True)] if launcher == "cluster" else []
        yield pytest.param(launcher, stage, marks=marks)


@pytest.mark.parametrize(("deepspeed", "stage"), list(cases()), indirect=["deepspeed"])
def test_a_stage_trains_with_its_own_class(
    deepspeed: Callable[..., DeepspeedTorchDistributor], stage: int
) -> None:
    check(deepspeed(config_of(stage)).run_all(train_by_command_line), stage)


@pytest.mark.slow(ci=True)
def test_the_program_of_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGES / "how-to" / "deepspeed.md"
    for name, value in SETTINGS["env"].items():
        monkeypatch.setenv(name, value)
    exec(as_script(page), {"__name__": "__main__"})
    assert differences(page, capsys.readouterr().out) == []


SCRIPT = """
import argparse, json, os
import deepspeed, torch

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--steps", type=int)
parser.add_argument("out")
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
losses = []
for _ in range(args.steps):
    loss = engine(torch.ones(8, 3)).pow(2).mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
with open(os.path.join(args.out, os.environ["RANK"]), "w") as out:
    json.dump([engine.zero_optimization_stage(), losses], out)
"""


@pytest.mark.slow
def test_a_script_trains(
    deepspeed: Callable[..., DeepspeedTorchDistributor], tmp_path: Path
) -> None:
    script, config = tmp_path / "train.py", tmp_path / "config.json"
    script.write_text(SCRIPT)
    config.write_text(json.dumps(config_of(3)))
    assert deepspeed(config).run(str(script), "--steps", 20, tmp_path) is None
    for rank in "01":
        stage, losses = json.loads((tmp_path / rank).read_text())
        assert stage == 3
        assert len(losses) == 20
        assert losses[-1] < losses[0] / 2
