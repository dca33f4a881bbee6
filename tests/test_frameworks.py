"""Lightning, Accelerate and Transformers train on ranks as they do under torchrun."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

from distributor import TorchDistributor
from distributor.train import Result

ROWS, BATCH, EPOCHS = 64, 8, 3
STEPS = EPOCHS * ROWS // (2 * BATCH)
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


class Report(NamedTuple):
    """What a rank returns about its training."""

    world_size: int
    seen: list[int]
    losses: list[float]
    parameters: list[float]


class Points(Dataset[Any]):
    """Points on a line with a little noise; records the rows that are requested."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.linspace(-1, 1, ROWS)[:, None]
        self.y = 3 * self.x + 1 + 0.01 * torch.randn(ROWS, 1, generator=generator)
        self.seen: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        self.seen.append(row)
        return self.x[row], self.y[row]


class Counting(Points):
    """Sequences of consecutive numbers, which a language model learns in a few steps."""

    def __getitem__(self, row: int) -> Any:
        self.seen.append(row)
        tokens = (row + torch.arange(8)) % 16
        return {"input_ids": tokens, "labels": tokens}


def flat(model: torch.nn.Module) -> list[float]:
    """Return all parameters of a model as numbers."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def with_lightning(folder: Path) -> Report:
    import lightning

    torch.manual_seed(0)

    class Line(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(1, 1)
            self.losses: list[float] = []

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y = batch
            loss = mse_loss(self.line(x), y)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.2)

    line, points = Line(), Points()
    trainer = lightning.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=2,
        max_epochs=EPOCHS,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(line, DataLoader(points, batch_size=BATCH, shuffle=True))
    return Report(trainer.world_size, points.seen, line.losses, flat(line))


def with_accelerate(folder: Path) -> Report:
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    points, losses = Points(), []
    plain = torch.nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        plain,
        torch.optim.SGD(plain.parameters(), lr=0.2),
        DataLoader(points, batch_size=BATCH, shuffle=True),
    )
    for _ in range(EPOCHS):
        for x, y in loader:
            loss = mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    accelerator.end_training()
    return Report(accelerator.num_processes, points.seen, losses, flat(plain))


def with_transformers(folder: Path) -> Report:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=16,
            n_positions=8,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            loss_type="ForCausalLMLoss",
        )
    )
    sentences = Counting()
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        learning_rate=0.05,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=sentences)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Report(arguments.world_size, sentences.seen, losses, flat(model))


@pytest.mark.parametrize(
    ("framework", "train"),
    [
        pytest.param("lightning", with_lightning, marks=pytest.mark.slow),
        ("accelerate", with_accelerate),
        pytest.param("transformers", with_transformers, marks=pytest.mark.slow),
    ],
)
def test_a_framework_trains_on_two_ranks(
    framework: str, train: Callable[[Path], Report], tmp_path: Path
) -> None:
    if find_spec(framework) is None:  # importing it here would only take time
        pytest.skip(f"{framework} is not installed")
    distributor = TorchDistributor(2, use_gpu=False, timeout=120, env=OFFLINE)

    reports = distributor.run_all(train, tmp_path)

    assert [report.world_size for report in reports] == [2, 2]
    assert [len(report.losses) for report in reports] == [STEPS, STEPS]
    assert all(len(report.seen) == STEPS * BATCH for report in reports)
    first_epoch = [row for report in reports for row in report.seen[: ROWS // 2]]
    assert sorted(first_epoch) == list(range(ROWS)), "each rank trained on its own half of the rows"
    # Ranks that saw different rows agree only if their gradients were reduced.
    assert reports[0].parameters == reports[1].parameters
    assert all(report.losses[-1] < report.losses[0] / 2 for report in reports)


@pytest.mark.slow
def test_t5_is_sharded_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the script of the notebooks folder for one epoch, then for two."""
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    script = Path(__file__).parents[1] / "notebooks" / "t5.py"
    distributor = TorchDistributor(
        2, use_gpu=False, timeout=240, env=OFFLINE, storage_path=tmp_path, name="t5"
    )

    for epochs in ("1", "2"):
        distributor.run(str(script), "--epochs", epochs, "--samples", "800", "--save")

    result = Result.from_path(tmp_path / "t5")
    assert [report.metrics["epoch"] for report in result.reports] == [1, 2]
    first, second = (report.metrics["validation_loss"] for report in result.reports)
    assert second < first < 5, "the untrained model's loss is log(384), which is 5.95"
    for checkpoint, _ in result.best_checkpoints:
        shards = sorted(path.name for path in Path(checkpoint.path).glob("*.distcp"))
        assert shards == ["__0_0.distcp", "__1_0.distcp"]
    lines = [line for line in capsys.readouterr().out.splitlines() if "validation loss" in line]
    assert [line.partition(":")[0] for line in lines] == ["[0] epoch 1", "[0] epoch 2"]
