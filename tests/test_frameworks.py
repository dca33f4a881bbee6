"""Lightning, Accelerate and Transformers train on ranks as they do under torchrun."""

from __future__ import annotations

import inspect
import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import cloudpickle
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

from distributor import (
    DeepspeedTorchDistributor,
    TorchDistributor,
    UnpicklableError,
    distributed,
)
from distributor.cli import main
from distributor.serialization.pickling import dump_value
from distributor.train import Result, RunConfig, ScalingConfig
from distributor.train.torch import TorchTrainer

cloudpickle.register_pickle_by_value(sys.modules[__name__])
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
    accelerator = Accelerator()
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


def arguments_of_trainer(folder: Path) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        learning_rate=0.05,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def with_transformers(folder: Path) -> Report:
    return with_trainer(arguments_of_trainer(folder))


def with_trainer(arguments: Any) -> Report:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer

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

    check_training(reports)


@pytest.mark.slow
def test_arguments_of_the_driver_train_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    arguments = arguments_of_trainer(tmp_path)
    assert arguments.world_size == 1
    distributor = TorchDistributor(2, use_gpu=False, timeout=120, env=OFFLINE)

    check_training(distributor.run_all(lambda: with_trainer(arguments)))


def check_training(reports: list[Report]) -> None:
    assert [report.world_size for report in reports] == [2, 2]
    assert [len(report.losses) for report in reports] == [STEPS, STEPS]
    assert all(len(report.seen) == STEPS * BATCH for report in reports)
    first_epoch = [row for report in reports for row in report.seen[: ROWS // 2]]
    assert sorted(first_epoch) == list(range(ROWS)), "each rank trained on its own half of the rows"
    # Ranks that saw different rows agree only if their gradients were reduced.
    assert reports[0].parameters == reports[1].parameters
    assert all(report.losses[-1] < report.losses[0] / 2 for report in reports)


# Each of these returns how many ranks a framework sees by default. A script has only its text.


def seen_by_its_variable() -> int:
    import os

    return int(os.environ["WORLD_SIZE"]) if os.environ["ACCELERATE_USE_CPU"] == "true" else 1


def seen_by_accelerate() -> int:
    from accelerate import Accelerator
    from accelerate.state import PartialState

    state = PartialState()
    assert (state.device.type, state.backend) == ("cpu", "gloo")
    accelerator = Accelerator()
    return min(state.num_processes, accelerator.num_processes)


def seen_by_transformers() -> int:
    from transformers import TrainingArguments

    arguments = TrainingArguments("unused", report_to="none")
    assert arguments.device.type == "cpu"
    return arguments.world_size


def seen_by_lightning() -> int:
    import lightning

    quiet = {"logger": False, "enable_checkpointing": False}
    trainers = [lightning.Trainer(**quiet, accelerator=name) for name in ("auto", "cpu")]
    trainers += [lightning.Fabric(), lightning.Fabric(accelerator="cpu")]
    for each in trainers:
        strategy = each.strategy
        assert strategy.root_device.type == "cpu"
        assert strategy.distributed_sampler_kwargs == {
            "num_replicas": each.world_size,
            "rank": each.global_rank,
        }
    alone = lightning.Trainer(**quiet, accelerator="cpu", devices=1, num_nodes=1)
    assert alone.world_size == 1, "what a program asks for"
    return min(each.world_size for each in trainers)


FRAMEWORKS = {
    "variable": seen_by_its_variable,
    "accelerate": seen_by_accelerate,
    "transformers": seen_by_transformers,
    "lightning": seen_by_lightning,
}

Seen = Callable[[], int]


def write_seen(seen: Seen, folder: Path) -> None:
    import os

    (folder / os.environ["RANK"]).write_text(str(seen()))


def script_of(seen: Seen, folder: Path) -> str:
    lines = [
        "from __future__ import annotations",
        inspect.getsource(seen),
        "import os",
        f"open({str(folder)!r} + '/' + os.environ['RANK'], 'w').write(str({seen.__name__}()))",
    ]
    script = folder.parent / "script.py"
    script.write_text("\n".join(lines))
    return str(script)


def by_function(seen: Seen, folder: Path, **mode: Any) -> None:
    TorchDistributor(2, use_gpu=False, env=OFFLINE, **mode).run(write_seen, seen, folder)


def by_script(seen: Seen, folder: Path, **mode: Any) -> None:
    TorchDistributor(2, use_gpu=False, env=OFFLINE, **mode).run(script_of(seen, folder))


def by_deepspeeds_class(seen: Seen, folder: Path, *, local_mode: bool) -> None:
    ranks = DeepspeedTorchDistributor(2, 1, local_mode, useGpu=False, env=OFFLINE)
    ranks.run(write_seen, seen, folder)


def by_deepspeeds_class_as_script(seen: Seen, folder: Path, *, local_mode: bool) -> None:
    ranks = DeepspeedTorchDistributor(2, 1, local_mode, useGpu=False, env=OFFLINE)
    ranks.run(script_of(seen, folder))


def by_trainer(seen: Seen, folder: Path, **mode: Any) -> None:
    TorchTrainer(
        lambda: write_seen(seen, folder),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False, **mode),
        run_config=RunConfig(storage_path=str(folder.parent / "storage")),
    ).fit()


def by_decorator(seen: Seen, folder: Path, *, local_mode: bool) -> None:
    decorate = distributed(gpus=2, use_gpu=False, remote=not local_mode, env=OFFLINE)
    decorate(write_seen).distributed(seen, folder)


def by_command(seen: Seen, folder: Path, *, local_mode: bool) -> None:
    options = ["run", "--cpu", "--nproc", "2"]
    if local_mode:
        assert main([*options, script_of(seen, folder)]) == 0
        return
    options += ["--cluster", "--master", "local[2]", "--conf", "spark.ui.enabled=false"]
    command = [sys.executable, "-m", "distributor", *options, script_of(seen, folder)]
    subprocess.run(command, check=True, timeout=300)


def on_dataframe(seen: Seen, folder: Path, *, local_mode: bool) -> None:
    from pyspark.sql import SparkSession

    rows = SparkSession.getActiveSession().range(4)
    ranks = TorchDistributor(2, local_mode=local_mode, use_gpu=False, env=OFFLINE)
    ranks.train_on_dataframe(write_seen, rows, seen, folder)


APIS = {
    "function": by_function,
    "script": by_script,
    "deepspeed": by_deepspeeds_class,
    "deepspeed script": by_deepspeeds_class_as_script,
    "trainer": by_trainer,
    "decorator": by_decorator,
    "command": by_command,
    "dataframe": on_dataframe,
}


def cases() -> Iterator[Any]:
    """Yield every interface on every place with every framework."""
    for place in ("local", "cluster"):
        for api in APIS:
            if (api, place) == ("dataframe", "local"):
                continue  # an error, as in PySpark's class
            for framework in FRAMEWORKS:
                everyday = {("command", "local")} if framework == "accelerate" else set()
                everyday |= {(api, place)} if framework == "variable" else set()
                everyday -= {("command", "cluster")}  # which starts a Spark of its own
                marks = [pytest.mark.spark(shared=api != "command")] if place == "cluster" else []
                marks += [] if (api, place) in everyday else [pytest.mark.slow]
                yield pytest.param(
                    api, place, framework, marks=marks, id=f"{api}-{place}-{framework}"
                )


@pytest.mark.parametrize(("api", "place", "framework"), list(cases()))
def test_every_rank_on_cpus_is_seen(
    api: str, place: str, framework: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if framework != "variable" and find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    if place == "cluster" and api != "command":
        request.getfixturevalue("spark")
    folder = tmp_path / "seen"
    folder.mkdir()

    APIS[api](FRAMEWORKS[framework], folder, local_mode=place == "local")

    assert {path.name: path.read_text() for path in folder.iterdir()} == {"0": "2", "1": "2"}


def test_arguments_of_the_driver_are_those_of_each_rank(tmp_path: Path) -> None:
    arguments_class = pytest.importorskip("transformers").TrainingArguments

    class Arguments(arguments_class):  # type: ignore[misc, valid-type]
        """A class of the program's own."""

    arguments = Arguments(str(tmp_path), learning_rate=0.5, report_to="none")
    arguments.note = "of the program's own"
    assert (arguments.world_size, arguments.process_index) == (1, 0)
    captured = SimpleNamespace(field=arguments_class(str(tmp_path), report_to="none"))

    def program(passed: Any) -> Any:
        import torch.distributed as dist

        assert not dist.is_initialized(), "the program may start the process group itself"
        seen = [(each.world_size, each.process_index) for each in (captured.field, passed)]
        assert isinstance(passed, arguments_class)
        return seen, passed.learning_rate, passed.note, passed

    returned = TorchDistributor(2, use_gpu=False, env=OFFLINE).run_all(program, arguments)

    for rank, (seen, *values, passed) in enumerate(returned):
        assert seen == [(2, rank)] * 2
        assert values == [0.5, "of the program's own"]
        assert type(passed) is Arguments
    assert arguments.world_size == 1, "the driver's are as they were"


def test_an_accelerator_of_the_driver_is_refused_and_a_state_made_anew() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator, state = accelerate.Accelerator(cpu=True), accelerate.PartialState()
    two_ranks = TorchDistributor(2, use_gpu=False, env=OFFLINE)

    def size(state: Any) -> int:
        return int(state.num_processes)

    assert two_ranks.run_all(size, state) == [2, 2]
    with pytest.raises(TypeError, match=r"The driver's Accelerator, .* was made for one process: "):
        two_ranks.run(lambda: size(accelerator))
    assert TorchDistributor(1, use_gpu=False).run(size, accelerator) == 1, "which is the same there"


@pytest.mark.slow
def test_what_was_prepared_for_the_driver_alone_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    prepared = accelerate.Accelerator(cpu=True).prepare(DataLoader([1, 2]), optimizer, scheduler)
    made = [accelerate.Accelerator(cpu=True), accelerate.state.AcceleratorState(), *prepared]
    if find_spec("transformers") is not None:
        from transformers import Trainer

        made.append(Trainer(model, arguments_of_trainer(Path("unused"))))
    if find_spec("lightning") is not None:
        import lightning

        made.append(lightning.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu"))
        made.append(lightning.Fabric(accelerator="cpu"))
    distributor = TorchDistributor(2, use_gpu=False, env=OFFLINE)

    for each in made:
        name = type(each).__name__
        with pytest.raises(TypeError, match=f"Make the {name} inside the function"):
            distributor.run(print, each)
        if name in ("Accelerator", "Trainer"):
            with pytest.raises(UnpicklableError, match=r"it belongs to the ranks; return "):
                dump_value([each], io.BytesIO(), "rank 0")


@pytest.mark.slow
def test_a_data_module_that_the_driver_has_used_is_used_by_ranks() -> None:
    lightning = pytest.importorskip("lightning")
    module = lightning.LightningDataModule()
    module.trainer = lightning.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")

    distributor = TorchDistributor(2, use_gpu=False, env=OFFLINE)

    assert distributor.run(lambda module: module.trainer, module) is None


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
