"""A run resumes from the latest intact checkpoint, and ignores what was never committed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from support.reports import count_on, save, use_plain_writes
from torch.distributed import fsdp

from distributor import TorchDistributor, train
from distributor._compat.torch import OPTIMIZER_IMPORTS
from distributor.core.rank_variables import CheckpointSettings
from distributor.train import Checkpoint
from distributor.train.storage.files import MANIFEST

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_plain_writes_are_enough(tmp_path: Path) -> None:
    """As on a mounted object store: no file is appended to, renamed or written twice."""

    def train_on_plain(until: int, mode: str) -> int:
        use_plain_writes()
        return count_on(tmp_path, until, mode)[0]

    address = f"plain://{tmp_path}/runs"
    env = CheckpointSettings(storage_path=address, name="mine", num_to_keep=2).to_variable()
    ranks = TorchDistributor(2, use_gpu=False, storage_path=address, name="mine", env=env)
    runs = tmp_path / "runs" / "mine"
    (runs / "checkpoint_000000").mkdir(parents=True)

    assert ranks.run(train_on_plain, 3, "SYNC") == 0
    assert {folder.name[-1] for folder in runs.glob("checkpoint_*")} == {"2", "3"}
    assert ranks.run(train_on_plain, 5, "ASYNC") == 3
    assert {folder.name[-1] for folder in runs.glob("checkpoint_*")} == {"4", "5"}


def test_uncommitted_files_do_not_mix_with_new_ones(tmp_path: Path) -> None:
    runs = tmp_path / "runs" / "mine"
    (runs / "checkpoint_000007").mkdir(parents=True)
    (runs / "checkpoint_000007" / "9.txt").write_text("of a rank that was killed")
    (runs / "checkpoint_000006").mkdir()
    (runs / "checkpoint_000006" / MANIFEST).write_text("{")
    ranks = TorchDistributor(2, use_gpu=False, storage_path=tmp_path / "runs", name="mine")

    begin, latest = ranks.run(count_on, tmp_path, 1)

    assert (begin, latest) == (0, f"{runs}/checkpoint_000008")
    assert not (runs / "checkpoint_000007").exists()
    assert (runs / "checkpoint_000006").exists(), "a person may be able to repair it"


def test_a_damaged_checkpoint_is_skipped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = TorchDistributor(2, use_gpu=False, storage_path=tmp_path / "runs", name="mine")
    _, latest = ranks.run(count_on, tmp_path, 2)
    assert latest is not None
    Path(latest, "1.txt").write_text("9")

    begin, latest = ranks.run(count_on, tmp_path, 2)

    assert begin == 1
    assert latest is not None
    assert latest.endswith("checkpoint_000002"), "the damaged one is not overwritten"
    shown = capfd.readouterr()
    assert "checkpoint_000001 is skipped: " in shown.out
    assert shown.err.count("whose latest checkpoint is checkpoint_000001. ") == 1


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(fsdp, "fully_shard"), reason=f"torch {torch.__version__} has another fully_shard"
)
def test_a_checkpoint_sharded_on_four_ranks_loads_on_others(tmp_path: Path) -> None:
    """With torch.distributed.checkpoint; parameters and optimizer state are bitwise equal."""

    def train_some(steps: int) -> Any:
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.Linear(24, 3)).double()
        fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters(), foreach=True)
        before = train.get_checkpoint()
        if before:
            states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
            with before.as_directory() as folder:
                dcp.load(states, checkpoint_id=folder)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=states["model"],
                optim_state_dict=states["optim"],
            )
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(4, 8, dtype=torch.float64)).sum().backward()
            optimizer.step()
        states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        if steps:
            folder = str(tmp_path / "local")
            dcp.save(states, checkpoint_id=folder)
            train.report({}, checkpoint=Checkpoint.from_directory(folder))
        whole = {name: value.full_tensor() for name, value in states["model"].items()}
        moments = {
            f"{name}.{key}": value.full_tensor()
            for name, state in states["optim"]["state"].items()
            for key, value in state.items()
            if hasattr(value, "full_tensor")
        }
        return {**whole, **moments}

    preload = ["torch.distributed.checkpoint", "torch.distributed.fsdp", *OPTIMIZER_IMPORTS]
    where: dict[str, Any] = {"storage_path": tmp_path / "runs", "name": "mine", "preload": preload}
    where |= {"use_gpu": False, "timeout": 120}
    saved = TorchDistributor(4, **where).run(train_some, 3)
    assert len(saved) == 12
    for ranks in (2, 3, 1):
        loaded = TorchDistributor(ranks, **where).run(train_some, 0)
        assert loaded.keys() == saved.keys()
        assert all((loaded[name] == saved[name]).all() for name in saved)


def test_the_name_of_a_damaged_checkpoint_can_be_used_again(tmp_path: Path) -> None:
    def report() -> str | None:
        found = train.get_checkpoint()
        for epoch in range(0 if found is None else int(found.path[-1]) + 1, 2):
            saved = save(tmp_path / "local", "x")
            train.report({}, checkpoint=saved, checkpoint_dir_name=f"epoch_{epoch}")
        return found and found.path[-7:]

    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path, name="mine")
    assert ranks.run(report) is None
    manifest = tmp_path / "mine" / "epoch_1" / MANIFEST
    manifest.write_text(manifest.read_text().replace("index", "idnex"))
    assert ranks.run(report) == "epoch_0"
    assert ranks.run(report) == "epoch_1"


def test_reports_after_the_checkpoint_are_forgotten(tmp_path: Path) -> None:
    """Unless the training is finished, and reports nothing when it runs again."""

    def report(stop: int) -> None:
        for step in range(0 if train.get_checkpoint() is None else 1, stop):
            saved = save(tmp_path / "local", "x") if step == 0 else None
            train.report({"step": step}, checkpoint=saved)

    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path, name="mine")
    for stop in (3, 3, 0):
        ranks.run(report, stop)
        reports = train.Result.from_path(tmp_path / "mine").reports
        assert [each.metrics for each in reports] == [{"step": step} for step in range(3)]
