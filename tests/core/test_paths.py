"""Paths that users write: those of this machine, addresses, and what is neither."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import distributor
from distributor import TorchDistributor, train
from distributor.core.files import absolute, local_path
from distributor.data import from_parquet

MISTAKES = {
    "dbfs:/x/y": "Write '/dbfs/x/y', the mount of DBFS, or the path of a volume: '/Volumes/",
    "dbfs:/Volumes/main/default/runs": "Write '/Volumes/main/default/runs'.",
    "s3a:b": "Write 's3://b'.",
    "hdfs:/u": "Write 'hdfs://HOST:PORT/u', or 'hdfs:///u' for the default host.",
    "file://tmp/x": "Write 'file:///tmp/x', or the path alone.",
    "/tmp/x\n": "begins or ends with a blank. Write '/tmp/x'.",
    "$HOME/x": f"only a shell replaces variables. Write '{os.path.expanduser('~')}/x'",
    "~no_such_user/x": "there is no user 'no_such_user' on this machine.",
}


@pytest.mark.parametrize(("path", "instead"), MISTAKES.items())
def test_a_path_that_would_become_a_folder_here(path: str, instead: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"storage_path is {path!r}, ")) as bad:
        absolute(path, "storage_path")
    assert instead in str(bad.value)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("a b/c", "/here/a b/c"),
        ("lr:0.1,depth:3/x", "/here/lr:0.1,depth:3/x"),
        ("./s3:/b", "/here/s3:/b"),
        (f"~{getpass.getuser()}/x", os.path.expanduser(f"~{getpass.getuser()}/x")),
        ("file:///a/b%20c", "/a/b c"),
        ("file://localhost/a", "/a"),
    ],
)
def test_a_path_of_this_machine(monkeypatch: pytest.MonkeyPatch, path: str, found: str) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/here")
    assert absolute(path) == local_path(path) == found


def test_addresses_stay_as_they_are_and_what_exists_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = "s3://bucket/a b"
    assert absolute(address) == address
    with pytest.raises(ValueError, match=r"log_dir is .* Write a path, such as that of a mount"):
        local_path(address, "log_dir")
    monkeypatch.chdir(tmp_path)
    Path("$HOME").mkdir()
    assert absolute("$HOME") == str(tmp_path / "$HOME")


USES: dict[str, Callable[[str], object]] = {
    "storage_path": lambda path: TorchDistributor(1, use_gpu=False, storage_path=path),
    "log_dir": lambda path: TorchDistributor(1, use_gpu=False, log_dir=path),
    "environment": lambda path: TorchDistributor(1, use_gpu=False, environment=path),
    "py_modules": lambda path: TorchDistributor(1, use_gpu=False, py_modules=[path]),
    "RunConfig": lambda path: train.RunConfig(storage_path=path),
    "from_directory": lambda path: train.Checkpoint.from_directory(path),
    "to_directory": lambda path: train.Checkpoint.from_directory("/").to_directory(path),
    "from_path": lambda path: train.Result.from_path(path),
    "from_parquet": lambda path: from_parquet(path),
    "doctor": lambda path: distributor.doctor(storage_path=path),
}


@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
def test_every_path_is_checked_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[str], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r" is 'dbfs:/x', "):
        use("dbfs:/x")
    assert list(tmp_path.iterdir()) == []
