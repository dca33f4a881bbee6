"""The names of ``databricks.air.data``: files of a folder, and positions among them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.utils.data import IterableDataset

from distributor import TorchDistributor, distributed, serverless_gpu
from distributor.air import data
from distributor.air.data import Checkpointable, DataLoader, UCVolumeDataset


def folder_of(count: int, folder: Path) -> Path:
    """Return a folder with so many files, each of which has its own name as its content."""
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:03}.txt").write_text(f"{number:03}")
    (folder / "subfolder").mkdir()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(23, tmp_path / "files")


def contents(paths: Any) -> list[int]:
    return [int(Path(path).read_text()) for path in paths]


def read(folder: str, workers: int, batches: int, state: Any = None) -> tuple[list[int], Any]:
    """Read so many batches of two files (all if -1), and return the files and the state."""
    loader = DataLoader(UCVolumeDataset(folder), batch_size=2, num_workers=workers)
    if state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
    found: list[int] = []
    iterator = iter(loader)
    while batches:
        batch = next(iterator, None)
        if batch is None:
            break
        found += contents(batch)
        batches -= 1
    return found, loader.state_dict()


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_and_workers_divide_the_files(folder: Path, workers: int) -> None:
    found = TorchDistributor(3, use_gpu=False, timeout=120).run_all(read, str(folder), workers, -1)

    files = [files for files, _ in found]
    assert sorted(itertools.chain(*files)) == list(range(23))
    assert sorted(map(len, files)) == [7, 8, 8]


def test_files_are_in_the_order_of_their_names(folder: Path) -> None:
    assert contents(UCVolumeDataset(folder)) == list(range(23))


@pytest.mark.parametrize(
    "sizes", [[(1, 0), (1, 2)], [(2, 2), (3, 1)], [(3, 1), (2, 0), (1, 3), (2, 2)]]
)
def test_a_loader_continues_on_any_number_of_ranks_and_workers(
    folder: Path, sizes: list[tuple[int, int]]
) -> None:
    files: list[int] = []
    state = None
    for number, (ranks, workers) in enumerate(sizes):
        batches = -1 if number == len(sizes) - 1 else 1 + workers % 2
        distributor = TorchDistributor(ranks, use_gpu=False, timeout=120)
        found = distributor.run_all(read, str(folder), workers, batches, state)
        files += itertools.chain(*(each for each, _ in found))
        state = found[0][1]

    assert sorted(files) == list(range(23))


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetched_files_are_not_lost(folder: Path, workers: int) -> None:
    first, state = read(str(folder), workers, 3)
    rest, _ = read(str(folder), workers, -1, state)

    assert len(first) == 6
    assert sorted(first + rest) == list(range(23))


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_only_the_first_pass_continues(folder: Path, workers: int, persistent: bool) -> None:
    _, state = read(str(folder), 1, 4)
    loader = DataLoader(
        UCVolumeDataset(folder),
        batch_size=None,
        num_workers=workers,
        persistent_workers=persistent,
    )
    loader.load_state_dict(state)
    assert loader.state_dict()["per_worker"]["0"]["earlier"] == [[1, [8]]]

    passes = [contents(loader) for _ in range(3)]
    assert [len(each) for each in passes] == [15, 23, 23]
    assert loader.state_dict()["per_worker"] == {}, "the next pass starts anew"

    next(iter(loader))
    iterator = iter(loader)
    assert loader.state_dict()["per_worker"] == {}, "a pass that was left does not count"
    assert len(contents(iterator)) == 23


def test_the_position_travels_with_checkpoints(tmp_path: Path) -> None:
    """Also to another number of ranks."""
    folder = folder_of(24, tmp_path / "files")
    storage = {"storage_path": str(tmp_path / "storage"), "name": "run", "timeout": 120}
    first = TorchDistributor(2, use_gpu=False, **storage).run_all(save_and_read, str(folder), 2)
    rest = TorchDistributor(4, use_gpu=False, **storage).run_all(save_and_read, str(folder), -1)

    assert [len(files) for files in first + rest] == [4, 4, 4, 4, 4, 4]
    assert sorted(itertools.chain(*first, *rest)) == list(range(24))


def save_and_read(folder: str, batches: int) -> list[int]:
    import tempfile

    from distributor import train

    loader = DataLoader(UCVolumeDataset(folder), batch_size=2, num_workers=1)
    seen: list[int] = []
    for step, batch in enumerate(loader, start=1):
        seen += contents(batch)
        with tempfile.TemporaryDirectory() as checkpoint:
            train.report({"step": step}, checkpoint=train.Checkpoint.from_directory(checkpoint))
        if step == batches:
            break
    return seen


class Squares(IterableDataset[int]):
    """Ten squares in each process, with progress of its own kind."""

    def __init__(self) -> None:
        self.start = self.number = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.start + 1, 11):
            self.number = number
            yield number**2

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.start = state_dict["number"]


@pytest.mark.parametrize("workers", [0, 2])
def test_other_datasets_continue_on_as_many_workers(workers: int) -> None:
    loader = DataLoader(Squares(), batch_size=None, num_workers=workers)
    assert isinstance(loader.dataset, Checkpointable)
    iterator = iter(loader)
    first = [next(iterator) for _ in range(4)]
    state = loader.state_dict()

    again = DataLoader(Squares(), batch_size=None, num_workers=workers)
    again.load_state_dict(state)
    rest = list(again)
    processes = workers or 1
    assert sorted(first + rest) == sorted([n**2 for n in range(1, 11)] * processes)
    with pytest.raises(ValueError, match=rf"with {workers} workers each, and .* 1 with 5"):
        DataLoader(Squares(), batch_size=None, num_workers=5).load_state_dict(state)


def test_files_that_are_elsewhere_are_copied(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(data, "MOUNTS", (f"{tmp_path}/",))
    dataset = UCVolumeDataset(folder)
    copies = list(dataset)
    assert contents(copies) == list(range(23))
    assert not any(copy.startswith(str(folder)) for copy in copies)
    assert contents(DataLoader(dataset, batch_size=None, num_workers=2)) != []
    assert contents(copies) == list(range(23)), "the disk has room"

    monkeypatch.setattr(data, "FREE_DISK", 1.0)
    for path in dataset:
        assert Path(path).exists()
        assert len(list(Path(path).parent.iterdir())) == 1
    parent = Path(path).parents[1]
    del dataset
    assert not parent.exists()


def test_distributed_checkpoints_of_a_folder(tmp_path: Path) -> None:
    state = {"weight": torch.arange(4.0)}
    dcp.save(state, storage_writer=data.UCVolumeWriter(tmp_path / "saved"), no_dist=True)
    state["weight"] = torch.zeros(4)
    dcp.load(state, storage_reader=data.UCVolumeReader(tmp_path / "saved"), no_dist=True)

    assert state["weight"].tolist() == [0, 1, 2, 3]
    for kind in (data.UCVolumeReader, data.UCVolumeWriter):
        with pytest.raises(ValueError, match=f"{kind.__name__} needs a folder, but path is 's3://"):
            kind("s3://bucket/run")


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path is '.*/missing', which is no folder"):
        UCVolumeDataset(tmp_path / "missing")
    with pytest.raises(ValueError, match="there are no files in this folder"):
        UCVolumeDataset(tmp_path)
    loader = DataLoader([1, 2], num_workers=0)
    assert len(list(loader)) == 2
    with pytest.raises(TypeError, match=r"state_dict needs a dataset .* is list"):
        loader.state_dict()
    (tmp_path / "file").touch()
    own = UCVolumeDataset(tmp_path)
    state = {**own.state_dict(), "stream": [1, 2, 0, 1]}
    with pytest.raises(ValueError, match=r"state is that of _Stream\(rank=1, world_size=2"):
        own.load_state_dict(state)


def test_the_older_package_has_the_same_names() -> None:
    from distributor.serverless_gpu import data as older

    assert older.DataLoader is DataLoader
    assert distributed is serverless_gpu.distributed
