"""Ranks that report together: what is in storage then, and from where the next run goes on."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.waiting import until

from distributor import DistributorError, Listener, TorchDistributor, WorkerDied, train
from distributor.core.checkpoint_config import CheckpointSettings
from distributor.train import Checkpoint, CheckpointUploadMode
from distributor.train.runtime import reporter, store_channel
from distributor.train.storage.checkpoint_store import MANIFEST, Manifest, Storage
from distributor.train.storage.retention import superfluous

cloudpickle.register_pickle_by_value(sys.modules[__name__])
Distribute = Callable[..., TorchDistributor]


def save(folder: Path, text: str) -> Checkpoint:
    """Save what this rank has."""
    rank = train.get_context().get_world_rank()
    mine = folder / f"of rank {rank}"
    mine.mkdir(parents=True, exist_ok=True)
    (mine / f"{rank}.txt").write_text(text)
    return Checkpoint.from_directory(mine)


def use_plain_writes() -> None:
    """Make addresses such as ``plain:///folder`` known."""
    import fsspec
    from support import plain

    fsspec.register_implementation(plain.PROTOCOL, plain.Addressed, clobber=True)


def go_on(folder: Path, until: int, mode: str = "SYNC") -> tuple[int, str | None]:
    """Count from where the latest checkpoint ends, and report at each step."""
    before = train.get_checkpoint()
    begin = 0
    if before:
        rank = train.get_context().get_world_rank()
        with before.as_directory() as there:
            begin = int(Path(there, f"{rank}.txt").read_text())
    for step in range(begin, until):
        train.report(
            {"step": step, "loss": 1 / (step + 1)},
            checkpoint=save(folder / str(step), str(step + 1)),
            checkpoint_upload_mode=CheckpointUploadMode(mode),
        )
    latest = train.get_checkpoint()
    return begin, latest.path if latest else None


def test_what_ranks_report_is_one_checkpoint(distribute: Distribute, tmp_path: Path) -> None:
    ranks = distribute(2, storage_path=tmp_path / "runs", name="mine")

    begin, latest = ranks.run(go_on, tmp_path, 2)

    assert begin == 0
    storage = Storage(tmp_path / "runs", "mine")
    assert latest == f"{storage.path}/checkpoint_000001"
    assert [manifest.metrics["step"] for _, manifest in storage.committed()] == [0, 1]
    files = {path.name: path.read_text() for path in Path(latest).glob("*.txt")}
    assert files == {"0.txt": "2", "1.txt": "2"}


def test_a_name_that_is_used_again_goes_on(tmp_path: Path) -> None:
    ranks = TorchDistributor(2, use_gpu=False, storage_path=tmp_path / "runs", name="mine")
    ranks.run(go_on, tmp_path, 2)

    begin, latest = ranks.run(go_on, tmp_path, 3)

    assert begin == 2
    assert latest is not None
    assert latest.endswith("checkpoint_000002")


def test_plain_writes_are_enough(tmp_path: Path) -> None:
    """Those of a mounted object store: nothing is appended to, renamed or written again."""

    def train_on_plain(until: int, mode: str) -> int:
        use_plain_writes()
        return go_on(tmp_path, until, mode)[0]

    address = f"plain://{tmp_path}/runs"
    env = CheckpointSettings(storage_path=address, name="mine", num_to_keep=2).to_variable()
    ranks = TorchDistributor(2, use_gpu=False, storage_path=address, name="mine", env=env)
    runs = tmp_path / "runs" / "mine"
    (runs / "checkpoint_000000").mkdir(parents=True)

    assert ranks.run(train_on_plain, 3, "SYNC") == 0
    assert {folder.name[-1] for folder in runs.glob("checkpoint_*")} == {"2", "3"}
    assert ranks.run(train_on_plain, 5, "ASYNC") == 3
    assert {folder.name[-1] for folder in runs.glob("checkpoint_*")} == {"4", "5"}


def test_what_was_never_committed_is_not_mixed_with_what_is(tmp_path: Path) -> None:
    runs = tmp_path / "runs" / "mine"
    (runs / "checkpoint_000007").mkdir(parents=True)
    (runs / "checkpoint_000007" / "9.txt").write_text("of a rank that was killed")
    (runs / "checkpoint_000006").mkdir()
    (runs / "checkpoint_000006" / MANIFEST).write_text("{")
    ranks = TorchDistributor(2, use_gpu=False, storage_path=tmp_path / "runs", name="mine")

    begin, latest = ranks.run(go_on, tmp_path, 1)

    assert (begin, latest) == (0, f"{runs}/checkpoint_000008")
    assert not (runs / "checkpoint_000007").exists()
    assert (runs / "checkpoint_000006").exists(), "somebody may mend it"


def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = TorchDistributor(2, use_gpu=False, storage_path=tmp_path / "runs", name="mine")
    _, latest = ranks.run(go_on, tmp_path, 2)
    assert latest is not None
    Path(latest, "1.txt").write_text("9")

    begin, latest = ranks.run(go_on, tmp_path, 2)

    assert begin == 1
    assert latest is not None
    assert latest.endswith("checkpoint_000002"), "what is damaged is not written over either"
    assert "checkpoint_000001 is passed over: " in capsys.readouterr().out


def test_what_is_reported_in_the_background_exists_at_the_end(tmp_path: Path) -> None:
    def report() -> None:
        for step in range(3):
            train.report(
                {"step": step},
                checkpoint=save(tmp_path / str(step), "x"),
                checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            )

    TorchDistributor(2, use_gpu=False, storage_path=tmp_path / "runs", name="mine").run(report)

    storage = Storage(tmp_path / "runs", "mine")
    assert [manifest.metrics["step"] for _, manifest in storage.committed()] == [0, 1, 2]
    assert not any((tmp_path / "0").iterdir()), "local folders are removed by default"


def test_only_some_ranks_have_something_to_save(tmp_path: Path) -> None:
    def report() -> list[str]:
        first = train.get_context().get_world_rank() == 0
        checkpoint = save(tmp_path, "whole") if first else None
        train.report({"loss": 1.0})
        train.report({"loss": 0.5}, checkpoint=checkpoint, checkpoint_dir_name="full_model")
        return [reported.checkpoint.path for reported in train.get_all_reported_checkpoints()]

    paths = TorchDistributor(2, use_gpu=False, storage_path=tmp_path / "runs", name="a").run(report)

    assert paths == [f"{tmp_path}/runs/a/full_model"]


@pytest.mark.parametrize("mode", ["SYNC", "ASYNC"])
@pytest.mark.parametrize("scheme", ["plain", "file"])
def test_ranks_that_save_into_one_folder_report_it_together(
    tmp_path: Path, scheme: str, mode: str
) -> None:
    """Each file is brought once: plain writes would be refused another time."""

    def report() -> None:
        use_plain_writes()
        rank = train.get_context().get_world_rank()
        for step in range(3):
            folder = tmp_path / str(step)
            folder.mkdir(exist_ok=True)
            for file in range(rank, 8, 3):
                (folder / f"__{file}_0.distcp").write_text(f"{step}")
            train.report(
                {},
                checkpoint=Checkpoint.from_directory(folder),
                checkpoint_dir_name=f"step {step}",
                checkpoint_upload_mode=CheckpointUploadMode(mode),
            )

    address = f"{scheme}://{tmp_path}/runs"
    TorchDistributor(3, use_gpu=False, storage_path=address, name="mine").run(report)

    found = Storage(tmp_path / "runs", "mine").committed()
    files = [(name, len(manifest.files)) for name, manifest in found]
    assert files == [(f"step {step}", 8 + 1) for step in range(3)], "and the record"
    assert (tmp_path / "0").exists() == (mode == "SYNC")


@pytest.mark.parametrize("mode", ["SYNC", "NO_UPLOAD"])
def test_what_is_saved_in_storage_stays_where_it_is(tmp_path: Path, mode: str) -> None:
    """Whole, though a rank is late."""

    def report() -> None:
        train.report({})  # makes the run's folder
        rank = train.get_context().get_world_rank()
        folder = tmp_path / "mine" / "full_model"
        folder.mkdir(exist_ok=True)
        with (folder / f"{rank}.txt").open("w", buffering=1) as file:
            file.write("x\n")
            time.sleep(rank)
            file.write("x\n")
        train.report(
            {},
            checkpoint=Checkpoint.from_directory(folder),
            checkpoint_dir_name="full_model",
            checkpoint_upload_mode=CheckpointUploadMode(mode),
            delete_local_checkpoint_after_upload=True,
        )

    TorchDistributor(2, use_gpu=False, storage_path=tmp_path, name="mine").run(report)

    storage = Storage(tmp_path, "mine")
    [(name, manifest)] = storage.committed()
    assert {file.name: file.size for file in manifest.files[:2]} == {"0.txt": 4, "1.txt": 4}
    assert storage.damage_of(name, manifest.files) is None
    with pytest.raises(DistributorError, match=r"full_model is already in .*mine, and is not"):
        storage.described("full_model")


def test_a_checkpoint_is_reported_again(tmp_path: Path) -> None:
    """From its own folder, which is not given up."""

    def report() -> None:
        train.report({"step": 0}, checkpoint=save(tmp_path, "x"))
        train.report(
            {"step": 1},
            checkpoint=train.get_checkpoint(),
            delete_local_checkpoint_after_upload=True,
        )

    TorchDistributor(2, use_gpu=False, storage_path=tmp_path, name="mine").run(report)

    storage = Storage(tmp_path, "mine")
    found = storage.committed()
    assert [manifest.metrics["step"] for _, manifest in found] == [0, 1]
    assert [storage.damage_of(name, manifest.files) for name, manifest in found] == [None] * 2
    ours = [
        {each for each in manifest.files if each.name.endswith(".txt")} for _, manifest in found
    ]
    assert len(ours[0]) == 2
    assert ours[0] == ours[1]


def test_a_second_name_that_a_killed_rank_left_leads_to_no_checkpoint(tmp_path: Path) -> None:
    local = tmp_path / "local"

    def report(text: str) -> str:
        found = train.get_checkpoint()
        local.mkdir(exist_ok=True)
        (local / "state").write_text(text)  # over what is there, and into it
        if found is None:
            checkpoint = Checkpoint.from_directory(local)
            train.report({}, checkpoint, delete_local_checkpoint_after_upload=True)
            return ""
        return Path(found.path, "state").read_text()

    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path / "runs", name="mine")
    ranks.run(report, "saved")
    stored = tmp_path / "runs/mine/checkpoint_000000/state"
    assert stored.stat().st_nlink == 1
    local.mkdir()
    os.link(stored, local / "state")  # as if it had been killed just before the folder went

    assert ranks.run(report, "of the next attempt") == "saved"
    assert (local / "state").read_text() == "of the next attempt"
    assert {path.name for path in stored.parent.iterdir()} >= {"state"}
    assert not list(stored.parent.glob("*.partial"))


def test_ranks_that_differ_in_the_name_are_told_so(tmp_path: Path) -> None:
    def report() -> None:
        name = f"of {train.get_context().get_world_rank()}"
        train.report({}, checkpoint=save(tmp_path, "x"), checkpoint_dir_name=name)

    ranks = TorchDistributor(2, use_gpu=False, storage_path=tmp_path / "runs")
    with pytest.raises(DistributorError, match="names: 'of 1' on rank 1, 'of 0' on rank 0"):
        ranks.run(report)


def test_ranks_that_do_not_report_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def report() -> None:
        train.report({"loss": 2.0})
        store_channel.WAIT_SECONDS, store_channel.LATE_SECONDS = 6.0, 2.0
        if train.get_context().get_world_rank() in (0, 2):
            train.report({"loss": 1.0})
        else:
            train.get_checkpoint()

    env = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # it times out sooner when it says nothing
    ranks = TorchDistributor(4, use_gpu=False, storage_path=tmp_path, env=env, timeout=120)
    waits = r"rank 0 still waits for ranks 1, 3"
    with pytest.raises(DistributorError, match=f"After 6 s, {waits}. Every rank has to call"):
        ranks.run(report)
    assert re.search(f"After 2 s, {waits} to report", capfd.readouterr().out)


def test_a_rank_that_is_late_to_report_is_waited_for(tmp_path: Path) -> None:
    told = tmp_path / "told"

    def report() -> int:
        train.report({"step": 0})
        store_channel.LATE_SECONDS = 0.5
        if train.get_context().get_world_rank() == 1:
            until(told.exists, "rank 0 has told of it", 60)
        train.report({"step": 1})
        return 1

    class Told(Listener):
        def printed(self, rank: int, stream: str, data: bytes) -> None:
            if b"rank 0 still waits for rank 1 to report" in data:
                told.touch()

    env = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    ranks = TorchDistributor(
        3, use_gpu=False, storage_path=tmp_path, env=env, timeout=120, listeners=[Told()]
    )
    assert ranks.run_all(report) == [1, 1, 1]


def test_a_rank_that_dies_is_the_cause_and_not_who_waits_for_it(tmp_path: Path) -> None:
    def report() -> None:
        train.get_checkpoint()
        if train.get_context().get_world_rank() == 0:
            until((tmp_path / "waits").exists, "rank 1 waits", 60)
            os._exit(5)
        (tmp_path / "waits").touch()
        train.report({"loss": 1.0})

    ranks = TorchDistributor(2, use_gpu=False, storage_path=tmp_path / "runs", timeout=120)
    with pytest.raises(WorkerDied, match=r"rank 0 .* exited with code 5"):
        ranks.run(report)


def test_ranks_that_do_not_share_their_storage_are_named(tmp_path: Path) -> None:
    """As on hosts where the path is a folder of each host's own."""

    def report() -> None:
        rank = train.get_context().get_world_rank()
        os.environ["DISTRIBUTOR_TRAIN"] = CheckpointSettings(
            storage_path=str(tmp_path / f"of {min(rank, 1)}"), name="mine"
        ).to_variable()["DISTRIBUTOR_TRAIN"]
        train.report({"loss": 1.0})

    ranks = TorchDistributor(3, use_gpu=False, timeout=120)
    told = rf"sees at {tmp_path}/of 0/mine: rank 1 on .*: what it writes is not there; rank 2 on "
    with pytest.raises(DistributorError, match=told):
        ranks.run(report)


@pytest.mark.spark
def test_storage_is_looked_at_before_the_function_runs(spark: Any, tmp_path: Path) -> None:
    """A path that is another folder on each executor, and a function that may take days."""
    ranks = TorchDistributor(
        4, local_mode=False, use_gpu=False, storage_path="/proc/self/cwd/runs", timeout=120
    )
    with pytest.raises(DistributorError, match="The ranks do not share the storage") as caught:
        ranks.run((tmp_path / "ran").touch)
    assert not (tmp_path / "ran").exists()
    assert hasattr(caught.value, "rank_failures")


def test_storage_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    ranks = TorchDistributor(2, use_gpu=False, storage_path=tmp_path / "runs", timeout=120)
    with pytest.raises(DistributorError, match=r"rank 0 on .*: NotADirectoryError"):
        ranks.run(lambda: train.report({"loss": 1.0}))


def test_what_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    def report(case: str) -> None:
        folder = tmp_path / "folder"
        if case == "empty":
            folder.mkdir(exist_ok=True)
        checkpoint: Any = str(folder) if case == "path" else Checkpoint.from_directory(folder)
        train.report({"loss": 1.0}, checkpoint=checkpoint)

    ranks = TorchDistributor(2, use_gpu=False, storage_path=tmp_path / "runs", timeout=120)
    with pytest.raises(TypeError, match=r"made by Checkpoint.from_directory, but is '/"):
        ranks.run(report, "path")
    with pytest.raises(DistributorError, match=r"Rank 0 could not .*There is no checkpoint at /"):
        ranks.run(report, "missing")
    with pytest.raises(DistributorError, match="The checkpoint is empty: no rank has saved"):
        ranks.run(report, "empty")
    assert not any((tmp_path / "runs").rglob(MANIFEST))


def test_metrics_may_be_numbers_of_tensors(tmp_path: Path) -> None:
    def report() -> None:
        import torch

        train.report({"loss": torch.tensor(0.5), "names": ["a"]}, checkpoint=save(tmp_path, "x"))
        train.report({"weights": torch.ones(2)})

    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path / "runs", name="mine")
    with pytest.raises(TypeError, match=r"Metrics are what JSON can hold.* one is tensor\(\[1"):
        ranks.run(report)
    [(_, manifest)] = Storage(tmp_path / "runs", "mine").committed()
    assert manifest.metrics == {"loss": 0.5, "names": ["a"]}


def test_many_reports_leave_the_store_as_it_was(tmp_path: Path) -> None:
    def report() -> list[int]:
        counts = []
        for number in range(30):
            saved = save(tmp_path, "x") if number % 3 == 0 else None
            train.report({"loss": 1.0}, checkpoint=saved)
            counts.append(reporter.current()._channel._store.num_keys())
        return counts

    ranks = TorchDistributor(2, use_gpu=False, storage_path=tmp_path / "runs", timeout=120)
    counts = ranks.run(report)
    assert max(counts[10:]) - min(counts[10:]) <= 6, counts


def test_files_of_one_name_that_differ_are_told(tmp_path: Path) -> None:
    def report() -> None:
        mine = tmp_path / str(train.get_context().get_world_rank())
        mine.mkdir()
        (mine / "model.pt").write_text(mine.name)
        train.report({}, checkpoint=Checkpoint.from_directory(mine))

    ranks = TorchDistributor(2, use_gpu=False, storage_path=tmp_path / "runs")
    with pytest.raises(DistributorError, match="Several ranks report a file model"):
        ranks.run(report)


def test_sharded_on_four_ranks_and_loaded_on_others(tmp_path: Path) -> None:
    """By torch.distributed.checkpoint, parameters and optimizer alike to the last bit."""

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

    where = {"use_gpu": False, "storage_path": tmp_path / "runs", "name": "mine", "timeout": 120}
    saved = TorchDistributor(4, **where).run(train_some, 3)
    assert len(saved) == 12
    for ranks in (2, 3, 1):
        loaded = TorchDistributor(ranks, **where).run(train_some, 0)
        assert loaded.keys() == saved.keys()
        assert all((loaded[name] == saved[name]).all() for name in saved)


def test_outside_a_run_there_is_nobody_to_report_to() -> None:
    with pytest.raises(RuntimeError, match="report and get_checkpoint are for the ranks of a run"):
        train.report({"loss": 1.0})
    assert train.get_context().get_world_size() == 1


def test_without_storage_nothing_can_be_kept() -> None:
    with pytest.raises(RuntimeError, match="This run keeps nothing: give TorchDistributor a"):
        TorchDistributor(1, use_gpu=False).run(lambda: train.report({}))


def test_files_of_a_killed_attempt_are_not_in_a_checkpoint_of_the_same_name(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "mine" / "epoch_5" / "deep"
    folder.mkdir(parents=True)
    (folder / "rank1.txt").write_text("of an attempt that was killed")

    def report() -> None:
        train.report({}, checkpoint=save(tmp_path / "local", "x"), checkpoint_dir_name="epoch_5")

    TorchDistributor(1, use_gpu=False, storage_path=tmp_path, name="mine").run(report)
    files = [p.name for p in (tmp_path / "mine" / "epoch_5").rglob("*") if p.is_file()]
    assert sorted(files) == [MANIFEST, ".reports.jsonl", "0.txt"]


def test_a_training_that_has_ended_and_is_run_again_loses_nothing(tmp_path: Path) -> None:
    def report() -> None:
        if train.get_checkpoint() is None:
            train.report({"step": 0}, checkpoint=save(tmp_path / "local", "x"))
            train.report({"step": 1})

    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path, name="mine")
    for _ in range(2):
        ranks.run(report)
        assert train.Result.from_path(tmp_path / "mine").metrics == {"step": 1}


def test_what_cannot_be_removed_keeps_nothing_from_being_reported(tmp_path: Path) -> None:
    def report() -> int:
        def fail(self: Storage, checkpoint: str) -> None:
            raise PermissionError("not yours")

        Storage.remove = fail  # type: ignore[method-assign]
        for step in range(3):
            train.report({"step": step}, checkpoint=save(tmp_path / str(step), "x"))
        return len(train.get_all_reported_checkpoints())

    env = CheckpointSettings(storage_path=str(tmp_path), name="mine", num_to_keep=1).to_variable()
    assert TorchDistributor(1, use_gpu=False, env=env).run(report) == 3


def test_metadata_may_be_added_to_what_is_stored(tmp_path: Path) -> None:
    def report() -> dict[str, Any] | None:
        if (found := train.get_checkpoint()) is not None:
            return found.get_metadata()
        checkpoint = save(tmp_path / "local", "x")
        checkpoint.set_metadata({"epoch": 1})
        train.report({}, checkpoint=checkpoint)
        return None

    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path, name="mine")
    ranks.run(report)
    storage = Storage(tmp_path, "mine")
    storage.checkpoint("checkpoint_000000").update_metadata({"accuracy": 0.9})
    assert ranks.run(report) == {"epoch": 1, "accuracy": 0.9}


@pytest.mark.parametrize("name", ["epochs/3", ".", "..", "../elsewhere", "", 3])
def test_a_checkpoints_name_is_that_of_a_folder(tmp_path: Path, name: Any) -> None:
    def report() -> None:
        train.report({}, checkpoint=save(tmp_path / "local", "x"), checkpoint_dir_name=name)

    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path / "runs")
    with pytest.raises(ValueError, match="checkpoint_dir_name is the name of a folder, but is"):
        ranks.run(report)


def test_a_damaged_checkpoints_name_can_be_used_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def report() -> str | None:
        found = train.get_checkpoint()
        epoch = 0 if found is None else int(found.path[-1]) + 1
        for each in range(epoch, 2):
            train.report(
                {}, checkpoint=save(tmp_path / "local", "x"), checkpoint_dir_name=f"epoch_{each}"
            )
        return found and found.path[-7:]

    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path, name="mine")
    assert ranks.run(report) is None
    (tmp_path / "mine" / "epoch_1" / "0.txt").write_text("y")
    assert ranks.run(report) == "epoch_0"
    assert "epoch_1 is passed over" in capfd.readouterr().out
    assert ranks.run(report) == "epoch_1"

    manifest = tmp_path / "mine" / "epoch_1" / MANIFEST
    manifest.write_text(manifest.read_text().replace("index", "idnex"))
    assert ranks.run(report) == "epoch_0"
    assert "epoch_1 is passed over: its manifest is damaged" in capfd.readouterr().out


def test_what_fails_in_the_background_is_told_by_the_next_report(tmp_path: Path) -> None:
    def report() -> None:
        for step in range(1000):
            (tmp_path / "steps").write_text(str(step))
            folder = tmp_path / "never there" if step == 0 else None
            checkpoint = folder and Checkpoint.from_directory(folder)
            train.report({}, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
            time.sleep(0.01)

    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path / "runs")
    with pytest.raises(DistributorError, match="There is no checkpoint at"):
        ranks.run(report)
    assert int((tmp_path / "steps").read_text()) < 999


def test_only_a_folder_of_this_machine_is_given_up(tmp_path: Path) -> None:
    local = tmp_path / "local"

    def report() -> None:
        import fsspec

        local.mkdir()
        (local / "mine").write_text("x")
        elsewhere = fsspec.filesystem("memory")
        elsewhere.pipe(f"{local}/theirs", b"x")
        checkpoint = Checkpoint(str(local), elsewhere)
        train.report({}, checkpoint, delete_local_checkpoint_after_upload=True)

    TorchDistributor(1, use_gpu=False, storage_path=tmp_path / "runs", name="mine").run(report)
    assert (local / "mine").exists()
    assert (tmp_path / "runs/mine/checkpoint_000000/theirs").exists()


def test_what_lies_in_storage_has_its_folders_name(tmp_path: Path) -> None:
    def report(name: str | None) -> None:
        train.report({})
        folder = tmp_path / "mine" / "a"
        folder.mkdir(exist_ok=True)
        (folder / "x").write_text("x")
        train.report(
            {},
            Checkpoint.from_directory(folder),
            checkpoint_dir_name=name,
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )

    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path, name="mine")
    with pytest.raises(ValueError, match=r"With NO_UPLOAD .* and the name is 'b'"):
        ranks.run(report, "b")
    ranks.run(report, None)
    assert [name for name, _ in Storage(tmp_path, "mine").committed()] == ["a"]


def test_ranks_without_a_checkpoint_need_not_name_it(tmp_path: Path) -> None:
    def report() -> str:
        mine = train.get_context().get_world_rank() == 1
        checkpoint = save(tmp_path / "local", "x") if mine else None
        train.report({}, checkpoint=checkpoint, checkpoint_dir_name="best" if mine else None)
        found = train.get_checkpoint()
        assert found
        return found.path[-4:]

    ranks = TorchDistributor(2, use_gpu=False, storage_path=tmp_path / "runs")
    assert ranks.run_all(report) == ["best", "best"]


KEPT = [
    (None, None, "max", "0123"),
    (2, None, "max", "3"),
    (2, "accuracy", "max", "12"),
    (2, "accuracy", "min", "03"),
    (1, "accuracy", "max", "1"),
    (3, "unknown", "max", "23"),
]


@pytest.mark.parametrize(("keep", "attribute", "order", "kept"), KEPT)
def test_the_best_are_kept_and_the_latest(keep: Any, attribute: Any, order: Any, kept: str) -> None:
    scores = [0.1, 0.9, 0.5, 0.3]
    committed = [
        (
            f"checkpoint_{index:06d}",
            Manifest(index=index, metrics={"accuracy": score}, world_size=1, files=()),
        )
        for index, score in enumerate(scores)
    ]
    named = ("full_model", Manifest(index=4, metrics={}, world_size=1, files=()))
    checkpoint_settings = CheckpointSettings(
        storage_path="x", name="x", num_to_keep=keep, score_attribute=attribute, score_order=order
    )
    gone = superfluous([*committed, named], checkpoint_settings)
    left = [name[-1] for name, _ in committed if name not in gone]
    assert "".join(left) == kept
    assert "full_model" not in gone, "it is the latest"
