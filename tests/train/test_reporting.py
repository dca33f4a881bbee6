"""Reports of all ranks together, and the checkpoints that are then in storage."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow.fs as pafs
import pytest
from support.reports import TouchWhenPrinted, count_on, find_damage, save, use_plain_writes
from support.training import here
from support.waiting import until

from distributor import DistributorError, TorchDistributor, train
from distributor.train import Checkpoint, CheckpointUploadMode, RunConfig
from distributor.train.runtime import session, store_channel
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.manifest import RESERVED
from distributor.train.torch import TorchTrainer

cloudpickle.register_pickle_by_value(sys.modules[__name__])
Distribute = Callable[..., TorchDistributor]


def test_all_ranks_files_are_one_checkpoint(distribute: Distribute, tmp_path: Path) -> None:
    ranks = distribute(2, storage_path=tmp_path / "runs", name="mine")

    begin, latest = ranks.run(count_on, tmp_path, 2)

    assert begin == 0
    storage = Storage(tmp_path / "runs", "mine")
    assert latest == f"{storage.path}/checkpoint_000001"
    assert [manifest.metrics["step"] for _, manifest in storage.committed()] == [0, 1]
    files = {path.name: path.read_text() for path in Path(latest).glob("*.txt")}
    assert files == {"0.txt": "2", "1.txt": "2"}


def test_asynchronous_reports_are_complete_when_the_run_ends(tmp_path: Path) -> None:
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


def test_only_some_ranks_report_a_checkpoint(tmp_path: Path) -> None:
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
    """Each file is uploaded once: the file system refuses to write one twice."""

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
    assert files == [(f"step {step}", 8 + 1) for step in range(3)], "and the log"
    assert (tmp_path / "0").exists() == (mode == "SYNC")


def write_late(folder: Path, warned: Path) -> None:
    """Write this rank's file, of which rank 1 writes the end when rank 0 waits in its report."""
    store_channel.LATE_WARNING_SECONDS = 0.5
    rank = train.get_context().get_world_rank()
    folder.mkdir(exist_ok=True)
    with (folder / f"{rank}.txt").open("w", buffering=1) as file:
        file.write("x\n")
        if rank == 1:
            until(warned.exists, "rank 0 waits in its report", 60)
        file.write("y\n")


def test_a_file_that_a_late_rank_still_writes_is_complete(tmp_path: Path) -> None:
    """Rank 0 finds the file of rank 1, incomplete, in the folder that they share."""
    warned = tmp_path / "warned"
    folder = tmp_path / "local"

    def report() -> None:
        train.report({})  # makes the channel
        write_late(folder, warned)
        train.report({}, checkpoint=Checkpoint.from_directory(folder), checkpoint_dir_name="both")

    listener = TouchWhenPrinted(b"rank 0 still waits for rank 1", warned)
    TorchDistributor(
        2, use_gpu=False, storage_path=tmp_path, name="mine", timeout=120, listeners=[listener]
    ).run(report)

    stored = tmp_path / "mine" / "both"
    assert [(stored / f"{rank}.txt").read_text() for rank in (0, 1)] == ["x\ny\n"] * 2


@pytest.mark.parametrize("mode", ["SYNC", "NO_UPLOAD"])
def test_a_checkpoint_that_was_saved_in_storage_is_not_moved(tmp_path: Path, mode: str) -> None:
    """It is complete, although a rank is late."""
    warned = tmp_path / "warned"

    def report() -> None:
        train.report({})  # makes the run's folder
        folder = tmp_path / "mine" / "full_model"
        write_late(folder, warned)
        train.report(
            {},
            checkpoint=Checkpoint.from_directory(folder),
            checkpoint_dir_name="full_model",
            checkpoint_upload_mode=CheckpointUploadMode(mode),
            delete_local_checkpoint_after_upload=True,
        )

    listener = TouchWhenPrinted(b"rank 0 still waits for rank 1", warned)
    TorchDistributor(
        2, use_gpu=False, storage_path=tmp_path, name="mine", timeout=120, listeners=[listener]
    ).run(report)

    storage = Storage(tmp_path, "mine")
    [(name, manifest)] = storage.committed()
    assert {file.name: file.size for file in manifest.files[:2]} == {"0.txt": 4, "1.txt": 4}
    assert find_damage(storage, name, manifest) is None
    with pytest.raises(DistributorError, match=r"full_model already exists in .*mine, and is not"):
        storage.describe("full_model")


def test_a_stored_checkpoint_can_be_reported_again(tmp_path: Path) -> None:
    """From its own folder, which is not deleted."""

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
    assert [find_damage(storage, *each) for each in found] == [None] * 2
    ours = [
        {each for each in manifest.files if each.name.endswith(".txt")} for _, manifest in found
    ]
    assert len(ours[0]) == 2
    assert ours[0] == ours[1]


def test_reports_do_not_accumulate_keys_in_the_store(tmp_path: Path) -> None:
    def report() -> list[int]:
        counts = []
        for number in range(30):
            saved = save(tmp_path, "x") if number % 3 == 0 else None
            train.report({"loss": 1.0}, checkpoint=saved)
            counts.append(session.session.reporter._rounds._channel._store.num_keys())
        return counts

    ranks = TorchDistributor(2, use_gpu=False, storage_path=tmp_path / "runs", timeout=120)
    counts = ranks.run(report)
    assert max(counts[10:]) - min(counts[10:]) <= 6, counts


def test_metadata_can_be_added_to_a_stored_checkpoint(tmp_path: Path) -> None:
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


def test_only_local_folders_are_deleted_after_the_upload(tmp_path: Path) -> None:
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


def test_without_upload_the_name_is_that_of_the_folder(tmp_path: Path) -> None:
    def report(saved: str, name: str | None) -> None:
        train.report({})
        folder = tmp_path / "mine" / saved
        folder.mkdir(parents=True)
        (folder / "x").write_text("x")
        train.report(
            {},
            Checkpoint.from_directory(folder),
            checkpoint_dir_name=name,
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )

    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path, name="mine")
    ranks.run(report, "a", None)
    ranks.run(report, "b", "other")
    assert [name for name, _ in Storage(tmp_path, "mine").committed()] == ["a", "b"]
    with pytest.raises(ValueError, match=r"must already be a folder in .*/mine, but .*/mine/c/d"):
        ranks.run(report, "c/d", None)


def test_ranks_without_a_checkpoint_need_not_pass_its_name(tmp_path: Path) -> None:
    def report() -> str:
        mine = train.get_context().get_world_rank() == 1
        checkpoint = save(tmp_path / "local", "x") if mine else None
        train.report({}, checkpoint=checkpoint, checkpoint_dir_name="best" if mine else None)
        found = train.get_checkpoint()
        assert found
        return found.path[-4:]

    ranks = TorchDistributor(2, use_gpu=False, storage_path=tmp_path / "runs")
    assert ranks.run_all(report) == ["best", "best"]


def test_the_name_and_the_files_of_rank_0_are_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def report() -> str:
        rank = train.get_context().get_world_rank()
        mine = tmp_path / str(rank)
        mine.mkdir()
        (mine / "model.pt").write_text(f"of rank {rank}")
        (mine / "same.txt").write_text("same")
        (mine / f"{rank}.txt").write_text("own")
        train.report({}, Checkpoint.from_directory(mine), checkpoint_dir_name=f"of {rank}")
        found = train.get_checkpoint()
        assert found
        return found.path.rpartition("/")[2]

    ranks = TorchDistributor(3, use_gpu=False, storage_path=tmp_path / "runs", name="mine")
    assert ranks.run_all(report) == ["of 0"] * 3
    [(_, manifest)] = Storage(tmp_path / "runs", "mine").committed()
    names = {file.name for file in manifest.files} - set(RESERVED)
    assert names == {"model.pt", "same.txt", "0.txt", "1.txt", "2.txt"}
    assert (tmp_path / "runs/mine/of 0/model.pt").read_text() == "of rank 0"
    printed = capfd.readouterr().out
    assert printed.count("Several ranks report a file model.pt with different content") == 1
    assert "same.txt" not in printed
    assert printed.count("checkpoint_dir_name is 'of 1' on rank 1, but the checkpoint's name") == 1


def test_an_empty_checkpoint_is_reported_with_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def report() -> None:
        (tmp_path / "empty").mkdir(exist_ok=True)
        train.report({"loss": 1.0}, Checkpoint.from_directory(tmp_path / "empty"))

    TorchDistributor(2, use_gpu=False, storage_path=tmp_path / "runs", name="mine").run(report)
    [(name, manifest)] = Storage(tmp_path / "runs", "mine").committed()
    assert manifest.metrics == {"loss": 1.0}
    assert f"{name} is empty: no rank saved a file." in capfd.readouterr().out


def test_ranks_without_a_checkpoint_do_not_wait_for_an_upload_in_the_background(
    tmp_path: Path,
) -> None:
    def report() -> None:
        if train.get_context().get_world_rank() == 0:
            train.report({}, slow_to_read(tmp_path), checkpoint_upload_mode="ASYNC")
        else:
            train.report({})
            (tmp_path / "continues").touch()

    def slow_to_read(folder: Path) -> Checkpoint:
        """Return a checkpoint whose upload cannot end before rank 1 continues."""
        saved = save(folder, "x")
        as_directory = Checkpoint.as_directory

        def wait(self: Checkpoint) -> Any:
            until((folder / "continues").exists, "rank 1 continues", 60)
            return as_directory(self)

        Checkpoint.as_directory = wait  # type: ignore[method-assign]
        return saved

    TorchDistributor(2, use_gpu=False, storage_path=tmp_path / "runs", timeout=120).run(report)


def test_a_checkpoint_that_is_uploaded_when_the_program_has_failed(tmp_path: Path) -> None:
    def python_shuts_down() -> bool:
        from concurrent.futures import ThreadPoolExecutor

        try:
            ThreadPoolExecutor(1).submit(int)
        except RuntimeError:
            return True
        return False

    def fail() -> None:
        as_directory = Checkpoint.as_directory

        def wait(self: Checkpoint) -> Any:
            until(python_shuts_down, "the program has failed", 60)
            return as_directory(self)

        Checkpoint.as_directory = wait  # type: ignore[method-assign]
        train.report({}, save(tmp_path, "x"), checkpoint_upload_mode="ASYNC")
        raise ValueError("on purpose")

    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path / "runs", name="mine")
    with pytest.raises(ValueError, match="on purpose"):
        ranks.run(fail)
    assert len(Storage(tmp_path / "runs", "mine").committed()) == 1


def test_all_reported_checkpoints_are_those_that_this_rank_has_reported(tmp_path: Path) -> None:
    """A rank that is ahead waits for the other one."""

    def report() -> list[list[int]]:
        rank = train.get_context().get_world_rank()
        seen = []
        for step in range(4):
            saved = save(tmp_path / str(step), "x") if rank == 0 and step % 2 else None
            train.report({"step": step}, saved, checkpoint_upload_mode="ASYNC")
            if rank == 1 and step in (1, 3):
                found = train.get_all_reported_checkpoints()
                seen.append([each.metrics["step"] for each in found])
        return seen

    ranks = TorchDistributor(2, use_gpu=False, storage_path=tmp_path / "runs", timeout=120)
    first, last = ranks.run_all(report)[1]
    assert first == [1]
    assert last == [1, 3]


@pytest.mark.parametrize("custom", [False, True])
def test_the_storage_of_a_run_has_rays_names(tmp_path: Path, custom: bool) -> None:
    def report() -> dict[str, Any]:
        storage = train.get_context().get_storage()
        path = storage.build_checkpoint_path_from_name("epoch 3")
        with pytest.raises(ValueError, match="elsewhere is not in the run's folder"):
            storage.extract_checkpoint_dir_name_from_path("/elsewhere")
        with pytest.raises(RuntimeError, match=r"call report\(metrics, checkpoint\)"):
            storage.persist_current_checkpoint(Checkpoint(path), "epoch 3")
        assert storage.make_default_checkpoint_dir_name().startswith("checkpoint_20")
        return {
            "filesystems": (storage.filesystem.type_name, storage.storage_filesystem.type_name),
            "paths": (storage.storage_fs_path, storage.experiment_fs_path, storage.path),
            "name": storage.experiment_dir_name,
            "custom": storage.custom_fs_provided,
            "read_only": storage.read_only,
            "names": (path, storage.extract_checkpoint_dir_name_from_path(path)),
            "cwd": storage.local_working_directory,
        }

    filesystem = pafs.LocalFileSystem() if custom else None
    run = RunConfig("mine", tmp_path / "runs", filesystem, settings={"timeout": 120})
    folder = f"{tmp_path}/runs"
    trainer = TorchTrainer(report, scaling_config=here(), run_config=run)
    assert trainer.fit().return_value == {
        "filesystems": ("local", "local"),
        "paths": (folder, f"{folder}/mine", f"{folder}/mine"),
        "name": "mine",
        "custom": custom,
        "read_only": False,
        "names": (f"{folder}/mine/epoch 3", "epoch 3"),
        "cwd": os.getcwd(),
    }
