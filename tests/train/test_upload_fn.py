"""Checkpoints that the user's own function uploads."""

from __future__ import annotations

import itertools
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest
from support.reports import find_damage, save

from distributor import DistributorError, TorchDistributor, train
from distributor.train import Checkpoint
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.files import RESERVED

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


def test_a_function_copies_the_checkpoint_of_each_rank(tmp_path: Path) -> None:
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


UPLOADS: list[tuple[UploadFn | None, type[Exception], str]] = [
    (lambda checkpoint, name: checkpoint, ValueError, "in the run's folder .*, but has returned"),
    (lambda checkpoint, name: copy_to(f"my {name}", checkpoint), DistributorError, "rank 1 to 'my"),
    (lambda checkpoint, name: {}[name], KeyError, "checkpoint_000000"),
    (None, DistributorError, "_fn, but rank 1 does not"),
]


@pytest.mark.parametrize(("upload", "kind", "message"), UPLOADS)
def test_a_function_that_fails_on_one_rank_fails_the_report_on_all(
    tmp_path: Path, upload: UploadFn | None, kind: type[Exception], message: str
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
    assert failed.value.rank_failures.keys() == {0, 1}  # type: ignore[attr-defined]
    assert files_in(tmp_path / "runs") == {}


def test_a_ninth_upload_waits_for_the_first(tmp_path: Path) -> None:
    def report() -> list[bool]:
        may_end, returned = threading.Event(), []

        def upload(saved: Checkpoint, name: str) -> Checkpoint:
            may_end.wait()
            return copy_to(name, saved)

        for number in range(9):
            if number == 8:
                threading.Timer(0.5, may_end.set).start()
            saved = save(tmp_path / "local" / str(number), "x")
            train.report({}, saved, checkpoint_upload_mode="ASYNC", checkpoint_upload_fn=upload)
            returned.append(may_end.is_set())
        return returned

    assert ranks(tmp_path / "runs").run(report) == [False] * 8 + [True]


def test_ranks_may_upload_one_checkpoint_in_different_ways(tmp_path: Path) -> None:
    """The files of both ranks are one checkpoint; of a file that both have, rank 0's is kept."""
    ways = ["ASYNC", "SYNC", "NO_UPLOAD", None]
    pairs = [*itertools.product(ways, ways), ("function", "NO_UPLOAD"), (None, "function")]

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
                {},
                saved,
                checkpoint_dir_name=name,
                checkpoint_upload_mode="SYNC" if way in ("function", None) else way,
                delete_local_checkpoint_after_upload=False,
                checkpoint_upload_fn=(lambda each, name: copy_to(name, each))
                if way == "function"
                else None,
            )

    ranks(tmp_path / "runs").run(report)
    assert files_in(tmp_path / "runs") == {
        f"pair {number}": sorted({f"{rank}.txt" for rank in (0, 1) if pair[rank]} | {"shared"})
        for number, pair in enumerate(pairs)
        if any(pair)
    }
    of_rank_0 = [("SYNC", "SYNC"), ("ASYNC", "NO_UPLOAD"), ("NO_UPLOAD", "SYNC")]
    for number in map(pairs.index, of_rank_0):
        assert (tmp_path / f"runs/mine/pair {number}/shared").read_text() == "of rank 0"
