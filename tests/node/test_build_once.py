"""A folder is built once per node: by one process at a time, completely, in a writable place."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.waiting import SOON, until

from distributor.errors import ExecutorNotReady, StartTimeout
from distributor.node.cache import Build, build_once, cache_folder
from distributor.programs import unpack
from distributor.train.storage.checkpoint import shared_download


def build_now(folder: Path, build: Build = lambda *_: None, seconds: float = SOON) -> None:
    with build_once(folder, build, time.monotonic() + seconds):
        pass


HALF = """
import pathlib, signal, sys, time
from distributor.node.cache import build_once

def make(folder, lock):
    (folder / "half").touch()
    signal.pause()

with build_once(pathlib.Path(sys.argv[1]), make, time.monotonic() + 60):
    pass
"""


def test_a_killed_build_leaves_neither_a_partial_folder_nor_a_lock(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with subprocess.Popen([sys.executable, "-c", HALF, str(folder)]) as maker:
        until(lambda: (folder / "half").exists(), "it is being built")
        with pytest.raises(StartTimeout, match=f"still building {folder}"):
            build_now(folder, seconds=0)
        maker.send_signal(signal.SIGKILL)
    build_now(folder)
    assert not (folder / "half").exists()


@pytest.mark.parametrize(
    "prepare",
    [
        lambda folder: folder.symlink_to(folder.parent / "trap"),
        lambda folder: (folder.mkdir(), folder.chmod(0o777)),
        pytest.param(
            lambda folder: (folder.mkdir(), os.chown(folder, 12345, 12345)),
            marks=pytest.mark.skipif(os.getuid() != 0, reason="needs root"),
        ),
    ],
    ids=["a link", "writable", "another user's"],
)
def test_a_folder_that_others_have_prepared_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Path], object]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "trap").mkdir(mode=0o700)
    for name in (f"distributor-{os.getuid()}", f"distributor-checkpoints-{os.getuid()}"):
        prepare(tmp_path / name)
    variables = {"XDG_CACHE_HOME": "/proc/none"}
    with pytest.raises(ExecutorNotReady, match="is not a folder that only this user can write to"):
        cache_folder(variables)
    with shared_download("checkpoint", lambda folder: (folder / "model").touch()) as copy:
        assert copy.parent == tmp_path, "a new folder"
        assert copy.stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "trap").iterdir()) == []


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ["link/passwd", "../passwd.link", "to_a_file"])
def test_a_zip_does_not_write_outside_of_its_folder(tmp_path: Path, name: str) -> None:
    archive, outside = tmp_path / "environment.zip", tmp_path / "outside"
    outside.mkdir()
    with zipfile.ZipFile(archive, "w") as file:
        links = {"bin/link": "../lib", "link": outside, "to_a_file": outside / "new"}
        for path, target in links.items():
            link = zipfile.ZipInfo(path)
            link.external_attr = (stat.S_IFLNK | 0o777) << 16
            file.writestr(link, str(target))
        below = zipfile.ZipInfo(name)
        below.external_attr = (stat.S_IFLNK | 0o777) << 16 if name.endswith("link") else 0
        file.writestr(below, "of the archive")
    (tmp_path / "unpacked").mkdir()
    with pytest.raises(zipfile.BadZipFile, match="would be written outside of the folder"):
        unpack(archive, tmp_path / "unpacked")
    assert list(outside.iterdir()) == []
    assert not (tmp_path / "passwd.link").is_symlink()
