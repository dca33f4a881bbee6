"""Checkpoints that the user's own function uploads."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.reports import find_damage, save

from distributor import DistributorError, TorchDistributor, train
from distributor.errors import OtherRankFailed
from distributor.train import Checkpoint, CheckpointUploadMode
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.manifest import RESERVED

cloudpickle.register_pickle_by_value(sys.modules[__name__])
UploadFn = Callable[[Checkpoint, str], Checkpoint]


def ranks(folder: Path, count: int = 2) -> TorchDistributor:
    return TorchDistributor(count, use_gpu=False, storage_path=folder, name="mine", timeout=120)


def copy_to(name: str, checkpoint: Checkpoint) -> Checkpoint:
    """Copy a checkpoint into the run's folder."""
    path = train.get_context().get_storage().build_checkpoint_path_from_name(name)
    shutil.copytree(checkpoint.path, path, dirs_exist_ok=True)
    return Checkpoint.from_directory(path)


def files_in(folder: Path) -> dict[str, list[str]]:
    """Return the files of each committed checkpoint, all of which are undamaged."""
    storage = Storage(folder, "mine")
    found = storage.committed()
    assert [find_damage(storage, *each) for each in found] == ([None] * len(found))
    return {
        name: sorted({file.name for file in manifest.files} - set(RESERVED))
        for name, manifest in found
    }


@pytest.mark.parametrize("mode", ["SYNC", pytest.param("ASYNC", marks=pytest.mark.slow)])
def test_a_function_copies_the_checkpoint_of_each_rank(tmp_path: Path, mode: str) -> None:
    def report() -> list[str]:
        names = []

        def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
            names.append(name)
            return copy_to(name, checkpoint)

        rank = train.get_context().get_world_rank()
        for step in range(2):
            saved = save(tmp_path / str(step), "x") if (rank, step) != (1, 1) else None
            train.report(
                {},
                saved,
                checkpoint_dir_name="last" if step else None,
                checkpoint_upload_mode=mode,
                delete_local_checkpoint_after_upload=False,
                checkpoint_upload_fn=upload,
            )
        assert len(train.get_all_reported_checkpoints()) == 2
        return names

    names = ranks(tmp_path / "runs").run_all(report)

    assert names == [["checkpoint_000000", "last"], ["checkpoint_000000"]]
    assert files_in(tmp_path / "runs") == {
        "checkpoint_000000": ["0.txt", "1.txt"],
        "last": ["0.txt"],
    }
    assert (tmp_path / "0" / "of rank 0").exists()


def test_a_function_waits_for_a_save_into_storage(tmp_path: Path) -> None:
    """The mode is ASYNC, which deletes local folders: not those in storage."""

    def report() -> float:
        dist.init_process_group("gloo")
        group = dist.new_group(backend="gloo")  # not in use by the training
        storage = train.get_context().get_storage()
        state = {"weight": torch.full((4,), float(dist.get_rank()))}
        future: Any = None
        for step in range(2):
            if future is not None:
                future.result()  # torch makes one save at a time
            path = storage.build_checkpoint_path_from_name(str(step))
            future = dcp.async_save(state, checkpoint_id=path, process_group=group)

            def wait(checkpoint: Checkpoint, name: str, future: Any = future) -> Checkpoint:
                future.result()
                return checkpoint

            train.report(
                {"step": step},
                Checkpoint(path),
                checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
                checkpoint_upload_fn=wait,
            )
        reported = train.get_all_reported_checkpoints()
        assert [each.metrics["step"] for each in reported] == [0, 1]
        dcp.load(state, checkpoint_id=reported[-1].checkpoint.path)
        dist.destroy_process_group()
        return float(state["weight"].sum())

    ranks(tmp_path).run(report)
    found = files_in(tmp_path)
    assert list(found) == ["0", "1"]
    assert {".metadata", "__0_0.distcp"} <= set(found["1"])


def test_a_function_is_not_called_without_an_upload(tmp_path: Path) -> None:
    def report() -> None:
        def fail(checkpoint: Checkpoint, name: str) -> Checkpoint:
            raise AssertionError("called")

        train.report({}, checkpoint_upload_fn=fail)
        saved = copy_to("mine", save(tmp_path / "local", "x"))
        train.report({}, saved, checkpoint_upload_mode="NO_UPLOAD", checkpoint_upload_fn=fail)

    ranks(tmp_path, 1).run(report)
    assert files_in(tmp_path) == {"mine": ["0.txt"]}


BAD: list[tuple[Callable[[Checkpoint, str], Any], type[Exception], str]] = [
    (lambda checkpoint, name: None, ValueError, "must return a Checkpoint.* has returned None"),
    (
        lambda checkpoint, name: checkpoint,
        ValueError,
        r"in the run's folder .*/runs/mine \(local\), but has returned .*/of rank 1 \(local\).*"
        r"build_checkpoint_path_from_name\(checkpoint_dir_name\)",
    ),
    (
        lambda checkpoint, name: copy_to("deep/er", checkpoint),
        ValueError,
        "must return a checkpoint that is a folder in the run's folder",
    ),
    (lambda checkpoint, name: copy_to(f"my {name}", checkpoint), DistributorError, "rank 1 to 'my"),
    (lambda checkpoint, name: {}[name], KeyError, "checkpoint_000000"),
    (lambda checkpoint, name: train.report({}), RuntimeError, "cannot make or await one"),
]


@pytest.mark.parametrize(("upload", "kind", "message"), BAD)
def test_a_function_that_fails_on_one_rank_fails_the_report_on_all(
    tmp_path: Path, upload: UploadFn, kind: type[Exception], message: str
) -> None:
    def report() -> None:
        rank = train.get_context().get_world_rank()
        train.report(
            {},
            save(tmp_path / "local", "x"),
            checkpoint_upload_fn=upload if rank == 1 else lambda each, name: copy_to(name, each),
        )

    with pytest.raises(kind, match=message) as failed:
        ranks(tmp_path / "runs").run(report)
    failures = failed.value.rank_failures  # type: ignore[attr-defined]
    own = kind is not DistributorError
    assert type(failures[1].exception()) is kind
    assert type(failures[0].exception()) is (OtherRankFailed if own else DistributorError)
    assert files_in(tmp_path / "runs") == {}


def test_a_function_that_fails_in_the_background_fails_a_later_report(tmp_path: Path) -> None:
    def report() -> None:
        def fail(checkpoint: Checkpoint, name: str) -> Checkpoint:
            raise ZeroDivisionError("of the user")

        for step in itertools.count():
            train.report(
                {"step": step},
                save(tmp_path / "local", "x"),
                checkpoint_upload_mode="ASYNC",
                checkpoint_upload_fn=fail,
            )
            assert train.get_all_reported_checkpoints() == []  # raises no error of a report

    with pytest.raises(ZeroDivisionError, match="of the user"):
        ranks(tmp_path / "runs", 1).run(report)


@pytest.mark.parametrize("mode", ["NO_UPLOAD", "SYNC"])
def test_a_damaged_checkpoint_can_be_saved_again_in_its_place(tmp_path: Path, mode: str) -> None:
    def report(text: str) -> str | None:
        found = train.get_checkpoint()
        for epoch in range(0 if found is None else int(found.path[-1]) + 1, 2):
            saved = copy_to(f"epoch_{epoch}", save(tmp_path / "local", text))
            if mode == "SYNC":
                train.report({}, saved, checkpoint_upload_fn=lambda checkpoint, name: checkpoint)
            else:
                train.report({}, saved, checkpoint_upload_mode=mode)
        return found and Path(found.path).name

    assert ranks(tmp_path, 1).run(report, "x") is None
    (tmp_path / "mine" / "epoch_1" / "0.txt").write_text("damaged")
    assert ranks(tmp_path, 1).run(report, "y") == "epoch_0"
    assert (tmp_path / "mine" / "epoch_1" / "0.txt").read_text() == "y"
    assert files_in(tmp_path) == {"epoch_0": ["0.txt"], "epoch_1": ["0.txt"]}
    assert ranks(tmp_path, 1).run(report, "z") == "epoch_1"


def test_a_folder_of_the_users_own_is_not_removed_while_it_is_written(tmp_path: Path) -> None:
    def report() -> None:
        storage = train.get_context().get_storage()
        path = Path(storage.build_checkpoint_path_from_name("checkpoint_5"))
        path.mkdir()
        (path / "part").write_text("1")
        for step in range(2):
            train.report({}, save(tmp_path / f"local {step}", "x"))
        (path / "rest").write_text("2")
        train.report({}, Checkpoint(path), checkpoint_upload_mode="NO_UPLOAD")

    (tmp_path / "mine" / "checkpoint_000003").mkdir(parents=True)  # of an attempt that was killed
    ranks(tmp_path, 1).run(report)
    assert files_in(tmp_path) == {
        "checkpoint_000004": ["0.txt"],
        "checkpoint_000005": ["0.txt"],
        "checkpoint_5": ["part", "rest"],
    }
    assert not (tmp_path / "mine" / "checkpoint_000003").exists()


WAYS = ["ASYNC", "SYNC", "NO_UPLOAD", "function", None]


def is_refused(pair: tuple[str | None, ...]) -> bool:
    return "function" in pair and bool({"SYNC", "ASYNC"} & {*pair})


def test_a_function_on_some_ranks_only_is_an_error(tmp_path: Path) -> None:
    def report() -> None:
        upload = copy_named if train.get_context().get_world_rank() else None
        train.report({}, save(tmp_path / "local", "x"), checkpoint_upload_fn=upload)

    def copy_named(checkpoint: Checkpoint, name: str) -> Checkpoint:
        return copy_to(name, checkpoint)

    with pytest.raises(DistributorError, match="_fn, but rank 0 does not"):
        ranks(tmp_path / "runs").run(report)
    assert files_in(tmp_path / "runs") == {}


@pytest.mark.slow
def test_ranks_may_upload_one_checkpoint_in_different_ways(tmp_path: Path) -> None:
    """Each pair of ways, with each rank in each role; the files of both are one checkpoint."""
    pairs = [pair for pair in itertools.product(WAYS, WAYS) if not is_refused(pair)]

    def report() -> None:
        rank = train.get_context().get_world_rank()
        for number, pair in enumerate(pairs):
            way, name = pair[rank], f"pair {number}"
            saved = None if way is None else save(tmp_path / "local" / name, str(rank))
            if saved is not None:
                Path(saved.path, "shared").write_text(f"of rank {rank}")
            if way == "NO_UPLOAD":
                saved = copy_to(name, saved)
            train.report(
                {"rank": rank, "number": number},
                saved,
                checkpoint_dir_name=name,
                checkpoint_upload_mode="SYNC" if way in ("function", None) else way,
                delete_local_checkpoint_after_upload=False,
                checkpoint_upload_fn=(lambda each, name: copy_to(name, each))
                if way == "function"
                else None,
            )

    ranks(tmp_path / "runs").run(report)
    expected = {
        f"pair {number}": sorted({f"{rank}.txt" for rank in (0, 1) if pair[rank]} | {"shared"})
        for number, pair in enumerate(pairs)
        if any(pair)
    }
    assert files_in(tmp_path / "runs") == expected
    stored = Storage(tmp_path / "runs", "mine").committed()
    assert [manifest.metrics["rank"] for _, manifest in stored] == [0] * len(stored)
    of_rank_0 = [("SYNC", "SYNC"), ("ASYNC", "NO_UPLOAD"), ("NO_UPLOAD", "SYNC")]
    for number in map(pairs.index, of_rank_0):
        assert (tmp_path / f"runs/mine/pair {number}/shared").read_text() == "of rank 0"
