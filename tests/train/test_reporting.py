"""Reports of all ranks together, and the checkpoints that are then in storage."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from conftest import cluster_is_slow
from support.ranks import Distribute
from support.reports import TouchWhenPrinted, count_on, find_damage, save, use_plain_writes
from support.waiting import until

from distributor import TorchDistributor, train
from distributor.rank import store_channel
from distributor.train import Checkpoint
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.files import RESERVED

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@cluster_is_slow
def test_all_ranks_files_are_one_checkpoint(distribute: Distribute, tmp_path: Path) -> None:
    ranks = distribute(2, storage_path=tmp_path / "runs", name="mine")

    begin, latest = ranks.run(count_on, tmp_path, 2)

    assert begin == 0
    storage = Storage(tmp_path / "runs", "mine")
    assert latest == f"{storage.path}/checkpoint_000001"
    assert [manifest.metrics["step"] for _, manifest in storage.committed()] == [0, 1]
    files = {path.name: path.read_text() for path in Path(latest).glob("*.txt")}
    assert files == {"0.txt": "2", "1.txt": "2"}


def test_ranks_that_save_into_one_folder_report_it_together(tmp_path: Path) -> None:
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
            )

    address = f"plain://{tmp_path}/runs"
    TorchDistributor(3, use_gpu=False, storage_path=address, name="mine").run(report)

    found = Storage(tmp_path / "runs", "mine").committed()
    files = [(name, len(manifest.files)) for name, manifest in found]
    assert files == [(f"step {step}", 8 + 1) for step in range(3)], "and the log"


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


def test_a_file_that_a_late_rank_still_writes_is_complete(tmp_path: Path) -> None:
    """Rank 0 finds the file of rank 1, incomplete, in the folder that they share."""
    warned = tmp_path / "warned"
    folder = tmp_path / "local"

    def report() -> None:
        train.report({})  # makes the channel
        store_channel.LATE_WARNING_SECONDS = 0.5
        rank = train.get_context().get_world_rank()
        folder.mkdir(exist_ok=True)
        with (folder / f"{rank}.txt").open("w", buffering=1) as file:
            file.write("x\n")
            if rank == 1:
                until(warned.exists, "rank 0 waits in its report", 60)
            file.write("y\n")
        train.report({}, checkpoint=Checkpoint.from_directory(folder), checkpoint_dir_name="both")

    listener = TouchWhenPrinted(b"rank 0 still waits for rank 1", warned)
    TorchDistributor(
        2, use_gpu=False, storage_path=tmp_path, name="mine", timeout=120, listeners=[listener]
    ).run(report)

    stored = tmp_path / "mine" / "both"
    assert [(stored / f"{rank}.txt").read_text() for rank in (0, 1)] == ["x\ny\n"] * 2


def test_kinds_of_checkpoints(tmp_path: Path) -> None:
    """Of some ranks, stored already, empty, in the run's folder, and with metadata."""

    def report() -> Any:
        if (found := train.get_checkpoint()) is not None:
            return found.get_metadata()
        context = train.get_context()
        rank, storage = context.get_world_rank(), context.get_storage()
        train.report({"step": 0})
        train.report({}, save(tmp_path, "x") if rank == 0 else None, checkpoint_dir_name="of some")
        train.report(
            {},
            train.get_checkpoint(),
            checkpoint_dir_name="again",
            delete_local_checkpoint_after_upload=True,
        )
        (tmp_path / "empty").mkdir(exist_ok=True)
        train.report({}, Checkpoint(tmp_path / "empty"), checkpoint_dir_name="empty")
        placed = Path(storage.build_checkpoint_path_from_name("placed"))
        placed.mkdir(exist_ok=True)
        (placed / f"{rank}.txt").write_text("x")
        train.report({}, Checkpoint(placed), checkpoint_upload_mode="NO_UPLOAD")
        last = save(tmp_path / "last", "x")
        last.set_metadata({"epoch": 1})
        train.report({}, last, checkpoint_dir_name="last")
        return [Path(each.checkpoint.path).name for each in train.get_all_reported_checkpoints()]

    ranks = TorchDistributor(
        2, use_gpu=False, storage_path=tmp_path / "runs", name="mine", timeout=120
    )
    names = ["of some", "again", "empty", "placed", "last"]
    assert ranks.run(report) == names
    storage = Storage(tmp_path / "runs", "mine")
    found = storage.committed()
    assert [name for name, _ in found] == names
    assert [find_damage(storage, *each) for each in found] == [None] * len(names)
    stored = [{file.name for file in manifest.files} - set(RESERVED) for _, manifest in found]
    assert stored[:4] == [{"0.txt"}, {"0.txt"}, set(), {"0.txt", "1.txt"}]
    storage.checkpoint("last").update_metadata({"accuracy": 0.9})
    assert ranks.run(report) == {"epoch": 1, "accuracy": 0.9}
