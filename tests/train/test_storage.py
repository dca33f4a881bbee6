"""A committed checkpoint is complete, even on file systems that support few operations."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest
from support.plain import plain
from support.reports import find_damage

from distributor import DistributorError
from distributor.train.storage import files as stored_files
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.files import MANIFEST, Manifest

fsspec = pytest.importorskip("fsspec")


def of_type_bytes(data: Any) -> bytes:
    """Return what is written to a file; hdfs-native converts other types one byte at a time."""
    assert type(data) is bytes
    return data


def plain_by_fsspec(folder: Path) -> Any:
    """Return a file system that supports no more than a mounted object store."""
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem

    class Plain(LocalFileSystem):  # type: ignore[misc]
        def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            assert mode in ("rb", "wb"), f"{mode} is no plain write"
            assert mode == "rb" or not Path(path).exists(), f"{path} is written twice"
            file = super()._open(path, mode, **options)
            if mode == "wb":
                write = file.write
                file.write = lambda data: write(of_type_bytes(data))
            return file

        def mv(self, *args: Any, **options: Any) -> None:
            raise PermissionError("it cannot rename")

        mv_file = rename = move = ln = symlink = mv

    return DirFileSystem(str(folder), Plain())


@pytest.fixture(params=["local", "pyarrow", "fsspec"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Return a storage with all operations of local files, or with plain writes only."""
    folder = tmp_path / "storage"
    folder.mkdir()
    if request.param == "local":
        return Storage(folder, "run")
    if request.param == "pyarrow":
        return Storage(folder, "run", plain(pafs.LocalFileSystem()))
    return Storage("", "run", plain_by_fsspec(folder))


def saved_by(rank: int, folder: Path) -> Path:
    """Return a folder that a rank has saved: a shard, and another one in a subfolder."""
    mine = folder / f"of rank {rank}"
    (mine / "deep").mkdir(parents=True)
    (mine / f"__{rank}_0.distcp").write_bytes(bytes([rank]) * 1000)
    (mine / "deep" / f"{rank}.pt").write_bytes(b"x" * rank)
    return mine


def assign_all(files: Iterable[str]) -> Iterator[tuple[str, bool]]:
    return ((name, True) for name in files)


def save(storage: Storage, index: int, folder: Path, ranks: int = 2) -> str:
    name = f"checkpoint_{index:06d}"
    files = [
        file
        for rank in range(ranks)
        for file in storage.upload(saved_by(rank, folder / name), name, assign_all)[0]
    ]
    metrics = {"loss": 1 / (index + 1)}
    manifest = Manifest(index=index, metrics=metrics, world_size=ranks, files=tuple(files))
    storage.commit(name, manifest)
    return name


def test_committed_checkpoints_are_found_in_order(storage: Storage, tmp_path: Path) -> None:
    names = [save(storage, index, tmp_path) for index in (2, 0, 1)]

    found = storage.committed()
    assert [name for name, _ in found] == sorted(names)
    assert [manifest.metrics for _, manifest in found] == [
        {"loss": 1.0},
        {"loss": 0.5},
        {"loss": 1 / 3},
    ]
    assert [find_damage(storage, *each) for each in found] == [None] * 3
    with storage.checkpoint(names[0]).as_directory() as folder:
        assert Path(folder, "__1_0.distcp").read_bytes() == bytes([1]) * 1000
        assert Path(folder, "deep", "1.pt").read_bytes() == b"x"


def test_a_checkpoint_with_a_modified_manifest_is_not_committed(
    storage: Storage, tmp_path: Path
) -> None:
    name = save(storage, 0, tmp_path)
    text = storage.read(f"{name}/{MANIFEST}")
    assert text
    for modified in (text.replace(b"1000", b"1001"), text[:-1], text[:50], b""):
        storage.remove_files([f"{name}/{MANIFEST}"])
        storage.write(f"{name}/{MANIFEST}", modified)
        assert storage.committed() == []
        assert storage.survey().damaged == [name]


def test_a_committed_checkpoint_is_not_overwritten(storage: Storage, tmp_path: Path) -> None:
    name = save(storage, 0, tmp_path)
    with pytest.raises(DistributorError, match=f"{name} already exists in .*run, and is not"):
        storage.upload(saved_by(0, tmp_path), name, assign_all)


def test_a_file_of_another_size_in_storage_stops_the_commit(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "storage", "run")
    files, _ = storage.upload(saved_by(0, tmp_path), "a", assign_all)
    (tmp_path / "storage" / "run" / "a" / "deep" / "0.pt").write_bytes(b"more")
    with pytest.raises(
        DistributorError, match=r"incomplete: 0 bytes were written to .*0\.pt, which has 4"
    ):
        storage.commit("a", Manifest(index=0, world_size=1, files=tuple(files)))
    assert storage.committed() == []


def test_a_manifest_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """A checkpoint without a manifest counts as unfinished, and is removed later."""
    from fsspec import AbstractFileSystem
    from fsspec.implementations.local import LocalFileSystem

    def check(path: Any) -> None:
        if os.fspath(path).endswith(MANIFEST):
            raise ConnectionError("storage cannot be reached")

    class Unreachable(LocalFileSystem):  # type: ignore[misc]
        isfile = AbstractFileSystem.isfile

        def info(self, path: Any, **options: Any) -> Any:
            check(path)
            return super().info(path, **options)

        def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            check(path)
            return super()._open(path, mode, **options)

    save(Storage(tmp_path, "run"), 0, tmp_path)
    with pytest.raises(ConnectionError, match="storage cannot be reached"):
        Storage(str(tmp_path), "run", Unreachable()).survey()


def test_ranks_find_damage_in_files_that_they_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_files, "CHUNK", 1)
    monkeypatch.setattr(stored_files, "PIECE", 100)
    storage = Storage(tmp_path / "storage", "run")
    name = save(storage, 0, tmp_path)
    [(_, manifest)] = storage.committed()
    checkpoint, files = storage.checkpoint(name), manifest.files

    def check(size: int) -> None:
        shares = [stored_files.read_share(checkpoint, files, rank, size) for rank in range(size)]
        stored_files.check_parts(checkpoint, files, chain.from_iterable(shares))

    file = tmp_path / "storage" / "run" / name / "__1_0.distcp"
    content = file.read_bytes()
    for size in (1, 3, 7):
        check(size)
        for damaged in range(0, len(content), 99):
            file.write_bytes(content[:damaged] + b"?" + content[damaged + 1 :])
            with pytest.raises(stored_files.Damaged, match=r"__1_0\.distcp has been modified"):
                check(size)
        file.write_bytes(content)
    file.write_bytes(b"short")
    assert "has 5 bytes instead of 1,000" in str(find_damage(storage, name, manifest))
    file.unlink()
    assert "is missing" in str(find_damage(storage, name, manifest))
