"""Lightning, Accelerate and Transformers see the ranks that they run on, as under torchrun."""

from __future__ import annotations

import inspect
import io
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from conftest import cluster_is_slow
from support.ranks import Distribute
from torch.utils.data import DataLoader

from distributor import (
    TorchDistributor,
    UnpicklableError,
)
from distributor.serialization.pickling import dump_value
from distributor.train import Result

cloudpickle.register_pickle_by_value(sys.modules[__name__])
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


# Each of these returns how many ranks a framework sees by default. A script has only its text.


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


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
@cluster_is_slow
def test_every_rank_on_cpus_is_seen(distribute: Distribute, framework: str, tmp_path: Path) -> None:
    """By a function on this machine, and by a script on a cluster."""
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    folder, seen = tmp_path / "seen", FRAMEWORKS[framework]
    folder.mkdir()
    ranks = distribute(2, env=OFFLINE)

    if ranks.local_mode:
        ranks.run(write_seen, seen, folder)
    else:
        ranks.run(script_of(seen, folder))

    assert {path.name: path.read_text() for path in folder.iterdir()} == {"0": "2", "1": "2"}


@pytest.mark.slow
def test_arguments_of_the_driver_are_those_of_each_rank(tmp_path: Path) -> None:
    arguments_class = pytest.importorskip("transformers").TrainingArguments
    arguments = arguments_class(str(tmp_path), learning_rate=0.5, report_to="none")
    captured = SimpleNamespace(field=arguments)

    def program(passed: Any) -> Any:
        seen = [(each.world_size, each.process_index) for each in (captured.field, passed)]
        return seen, passed.learning_rate

    returned = TorchDistributor(2, use_gpu=False, env=OFFLINE).run_all(program, arguments)

    assert returned == [([(2, rank)] * 2, 0.5) for rank in range(2)]
    assert arguments.world_size == 1, "the driver's are as they were"


@pytest.mark.slow
def test_what_was_made_for_the_driver_alone_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator, state = accelerate.Accelerator(cpu=True), accelerate.PartialState()
    made = [accelerator, *accelerator.prepare(DataLoader([1, 2]), optimizer)]
    if find_spec("transformers") is not None:
        from transformers import Trainer, TrainingArguments

        arguments = TrainingArguments("unused", report_to="none")
        made.append(Trainer(model, arguments))
    if find_spec("lightning") is not None:
        import lightning

        made.append(lightning.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu"))
    two_ranks = TorchDistributor(2, use_gpu=False, env=OFFLINE)

    def size(state: Any) -> int:
        return int(state.num_processes)

    for each in made:
        name = type(each).__name__
        with pytest.raises(TypeError, match=f"Make the {name} inside the function"):
            two_ranks.run(print, each)
        if name in ("Accelerator", "Trainer"):
            with pytest.raises(UnpicklableError, match=r"it belongs to the ranks; return "):
                dump_value([each], io.BytesIO(), "rank 0")
    assert two_ranks.run_all(size, state) == [2, 2], "it is made anew"
    assert TorchDistributor(1, use_gpu=False).run(size, accelerator) == 1, "which is the same there"


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
