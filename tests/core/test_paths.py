"""Paths that users write: those of this machine, addresses, and what is neither."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import distributor
from distributor import TorchDistributor, train
from distributor.core.paths import absolute, local_path
from distributor.data import from_parquet

MISTAKES = {
    "dbfs:/x/y": "Write '/dbfs/x/y', the mount of DBFS, or the path of a volume: '/Volumes/",
    "dbfs:///x": "Write '/dbfs/x'",
    "dbfs:/Volumes/main/default/runs": "Write '/Volumes/main/default/runs'.",
    "s3:/b/x": "Write 's3://b/x' as a str, because a Path has no double slash.",
    "s3a:b": "Write 's3://b'.",
    "S3:/b": "Write 's3://b'",
    "gs:/b": "Write 'gs://b'",
    "abfss:/c@a.dfs.core.windows.net/x": "Write 'abfss://c@a.dfs.core.windows.net/x'",
    "hdfs:/u": "Write 'hdfs://HOST:PORT/u', or 'hdfs:///u' for the default host.",
    "mystore:/x": "Write 'mystore://x'",
    "file:x": "Write 'file:///x', or the path alone.",
    "file://tmp/x": "Write 'file:///tmp/x', or the path alone.",
    " /tmp/x": "begins or ends with a blank. Write '/tmp/x'.",
    "/tmp/x\n": "begins or ends with a blank. Write '/tmp/x'.",
    "$HOME/x": f"only a shell replaces variables. Write '{os.path.expanduser('~')}/x'",
    "/data/${HOME}": "only a shell replaces variables.",
    "$NO_SUCH_VARIABLE/x": "only a shell replaces variables.",
    "~no_such_user/x": "there is no user 'no_such_user' on this machine.",
}


@pytest.mark.parametrize(("path", "instead"), MISTAKES.items())
@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_that_would_become_a_folder_here(
    path: str, instead: str, kind: Callable[[str], Any]
) -> None:
    if kind is Path and "//" in path:
        pytest.skip("a Path has no double slash")
    with pytest.raises(ValueError, match=re.escape(f"storage_path is {path!r}, ")) as bad:
        absolute(kind(path), "storage_path")
    assert instead in str(bad.value)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/a/b", "/a/b"),
        ("a b/c", "/here/a b/c"),
        ("lr:0.1,depth:3/x", "/here/lr:0.1,depth:3/x"),
        ("./s3:/b", "/here/s3:/b"),
        ("cost in $", "/here/cost in $"),
        ("~/x", os.path.expanduser("~/x")),
        (f"~{getpass.getuser()}/x", os.path.expanduser(f"~{getpass.getuser()}/x")),
        ("file:/a/b", "/a/b"),
        ("file:///a/b%20c", "/a/b c"),
        ("file:///a/b c", "/a/b c"),
        ("file://localhost/a", "/a"),
        ("FILE:/a/caf%E9", os.fsdecode(b"/a/caf\xe9")),
    ],
)
def test_a_path_of_this_machine(monkeypatch: pytest.MonkeyPatch, path: str, found: str) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/here")
    assert absolute(path) == local_path(path) == found


def test_addresses_stay_as_they_are() -> None:
    for address in ("s3://bucket/a b", "hdfs:///u", "memory://x"):
        assert absolute(address) == address
        with pytest.raises(
            ValueError, match=r"log_dir is .* Write a path, such as that of a mount"
        ):
            local_path(address, "log_dir")


@pytest.mark.parametrize("name", [" a", "$HOME", "~no_such_user"])
def test_what_exists_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    assert absolute(name) == str(tmp_path / name)


USES: dict[str, Callable[[str], object]] = {
    "storage_path": lambda path: TorchDistributor(1, use_gpu=False, storage_path=path),
    "log_dir": lambda path: TorchDistributor(1, use_gpu=False, log_dir=path),
    "environment": lambda path: TorchDistributor(1, use_gpu=False, environment=path),
    "py_modules": lambda path: TorchDistributor(1, use_gpu=False, py_modules=[path]),
    "RunConfig": lambda path: train.RunConfig(storage_path=path),
    "Checkpoint": lambda path: train.Checkpoint(path),
    "from_directory": lambda path: train.Checkpoint.from_directory(path),
    "to_directory": lambda path: train.Checkpoint.from_directory("/").to_directory(path),
    "from_path": lambda path: train.Result.from_path(path),
    "from_parquet": lambda path: from_parquet(path),
    "doctor": lambda path: distributor.doctor(storage_path=path),
}


@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
@pytest.mark.parametrize("path", ["dbfs:/x", "s3:/b", "$HOME/x", " x"])
def test_every_path_is_checked_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[str], object], path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f" is {re.escape(repr(path))}, "):
        use(path)
    assert list(tmp_path.iterdir()) == []


def test_the_variable_of_an_administrator_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRIBUTOR_LOG_DIR", "dbfs:/logs")
    with pytest.raises(ValueError, match=r"DISTRIBUTOR_LOG_DIR is 'dbfs:/logs', .*'/dbfs/logs'"):
        TorchDistributor(1, use_gpu=False)


def note_and_save(folder: Path) -> None:
    (folder / "state").write_text("saved")
    train.report({}, checkpoint=train.Checkpoint.from_directory(folder))


def test_an_address_of_this_machine_is_storage(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    storage = f"file:{tmp_path}/runs"
    TorchDistributor(1, use_gpu=False, storage_path=storage, name="run", timeout=120).run(
        note_and_save, tmp_path / "state"
    )
    result = train.Result.from_path(f"{storage}/run")
    assert result.path == f"{tmp_path}/runs/run"
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as folder:
        assert Path(folder, "state").read_text() == "saved"
    assert TorchDistributor(1, use_gpu=False, log_dir=f"file:{tmp_path}/logs").log_dir == (
        f"{tmp_path}/logs"
    )
