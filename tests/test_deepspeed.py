"""DeepSpeed trains with ZeRO on the ranks of both of PySpark's classes."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import pytest
import torch
from support.pages import PAGES, as_script, differences
from torch.nn.functional import mse_loss

from distributor import DeepspeedTorchDistributor, TorchDistributor

if find_spec("deepspeed") is None:  # importing it here would only take time
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)
if not (shutil.which("c++") and Path(sysconfig.get_path("include"), "Python.h").is_file()):
    pytest.skip("DeepSpeed needs a C++ compiler and Python.h on CPUs", allow_module_level=True)

pytestmark = pytest.mark.slow
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS, STEPS, RATE = 16, 30, 0.2
SETTINGS: dict[str, Any] = {
    "timeout": 500,  # for the extension that DeepSpeed compiles at its first start
    "env": {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},  # ninja's
}


@pytest.fixture(scope="module", autouse=True)
def own_extensions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile into a new folder: in the user's, a killed process may have left its lock."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all processes of these tests: compiling takes minutes
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SETTINGS["env"], "TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
        yield


class Report(NamedTuple):
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
        return Report(
            engine.world_size,
            engine.zero_optimization_stage(),
            flat(model),
        )


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


def test_every_stage_trains_with_torch_distributor() -> None:
    stages = [1, 2, 3]
    of_ranks = TorchDistributor(2, use_gpu=False, **SETTINGS).run_all(train_stages, stages)
    for stage, reports in zip(stages, zip(*of_ranks, strict=True), strict=True):
        check(list(reports), stage)


@pytest.mark.parametrize(
    ("local_mode", "stage"),
    [(True, 2), pytest.param(False, 3, marks=pytest.mark.spark(shared=True))],
)
def test_a_stage_trains_with_its_own_class(
    local_mode: bool, stage: int, request: pytest.FixtureRequest
) -> None:
    if not local_mode:
        request.getfixturevalue("spark")
    shape = (2, 1) if local_mode else (1, 2)
    config = config_of(stage)
    ranks = DeepspeedTorchDistributor(*shape, local_mode, False, config, **SETTINGS)
    check(ranks.run_all(train_by_command_line), stage)


@pytest.mark.slow
def test_the_program_of_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGES / "how-to" / "deepspeed.md"
    for name, value in SETTINGS["env"].items():
        monkeypatch.setenv(name, value)
    exec(as_script(page), {"__name__": "__main__"})
    assert differences(page, capsys.readouterr().out) == []
