"""Lightning reports checkpoints and resumes from them."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from distributor import train
from distributor.train.torch import TorchTrainer

cloudpickle.register_pickle_by_value(sys.modules[__name__])
EPOCHS, ROWS, BATCH = 3, 32, 4


def points() -> DataLoader[Any]:
    x = torch.linspace(-1, 1, ROWS)[:, None]
    return DataLoader(TensorDataset(x, 3 * x + 1), batch_size=BATCH, shuffle=True)


def maybe_die(config: dict[str, Any], epoch: int) -> None:
    """Kill this rank at the end of the second epoch of the first attempt, if configured."""
    if config["killed"] and epoch == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def with_lightning(config: dict[str, Any]) -> list[float]:
    import lightning.pytorch as pl

    from distributor.train.lightning import (
        RayDDPStrategy,
        RayLightningEnvironment,
        RayTrainReportCallback,
        prepare_trainer,
    )

    torch.manual_seed(0)

    class Line(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if index == 3:
                maybe_die(config, self.current_epoch)
            x, y = batch
            loss = mse_loss(self.line(x), y)
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    trainer = pl.Trainer(
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        max_epochs=EPOCHS,
        callbacks=[RayTrainReportCallback()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer = prepare_trainer(trainer)
    line = Line()
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        trainer.fit(line, points())
    else:
        with checkpoint.as_directory() as folder:
            path = Path(folder, RayTrainReportCallback.CHECKPOINT_NAME)
            trainer.fit(line, points(), ckpt_path=path)
    mine = f"lightning_checkpoints-{os.environ['TORCHELASTIC_RUN_ID']}-*"
    assert not list(Path(tempfile.gettempdir()).glob(mine))
    return [parameter.item() for parameter in line.parameters()]


@pytest.mark.slow
def test_a_framework_reports_and_resumes(tmp_path: Path) -> None:
    if find_spec("lightning") is None:  # importing it here would only take time
        pytest.skip("lightning is not installed")

    def fit(name: str, *, killed: bool) -> train.Result:
        return TorchTrainer(
            with_lightning,
            train_loop_config={"killed": killed},
            scaling_config=train.ScalingConfig(num_workers=2, local_mode=True),
            run_config=train.RunConfig(
                name=name,
                storage_path=tmp_path,
                failure_config=train.FailureConfig(max_failures=1),
                settings={
                    "timeout": 120,
                    "env": {"OMP_NUM_THREADS": "1"},
                },
            ),
        ).fit()

    undisturbed, killed = fit("undisturbed", killed=False), fit("killed", killed=True)

    assert [report.attempt for report in undisturbed.reports] == [0, 0, 0]
    assert [report.attempt for report in killed.reports] == [0, 1, 1]
    losses = [report.metrics["loss"] for report in killed.reports]
    assert losses == [report.metrics["loss"] for report in undisturbed.reports]
    assert losses[-1] < losses[0] / 2
    assert killed.return_value == undisturbed.return_value
