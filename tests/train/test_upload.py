"""A file's way into storage: as a copy, or as a second name where nobody writes to the first."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any, NoReturn

import pyarrow.fs as pafs
import pytest
from support.plain import plain

from distributor.train.storage import upload
from distributor.train.storage.upload import size_and_checksum, upload_file

CONTENT = os.urandom(3 * upload.CHUNK + 7)
SUMS = (len(CONTENT), zlib.crc32(CONTENT))
HERE = pafs.LocalFileSystem()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "model.pt"
    file.write_bytes(CONTENT)
    return file


def refuse(*args: Any, **options: Any) -> NoReturn:
    raise OSError("it cannot do that")


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("filesystem", [HERE, plain(HERE)])
def test_what_is_brought_is_whole(file: Path, filesystem: Any, keep: bool) -> None:
    target = file.parent / "there"

    assert upload_file(file, filesystem, str(target), keep=keep) == SUMS

    assert target.read_bytes() == CONTENT
    assert size_and_checksum(filesystem, str(target)) == SUMS
    copied = keep or filesystem is not HERE
    assert file.samefile(target) != copied


def test_a_file_that_is_kept_may_be_written_over(file: Path) -> None:
    upload_file(file, HERE, str(file.parent / "there"), keep=True)
    file.write_bytes(b"of the next step")
    assert (file.parent / "there").read_bytes() == CONTENT


def test_where_there_are_no_links_files_are_copied(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse)
    assert upload_file(file, HERE, str(file.parent / "there"), keep=False) == SUMS
    assert not file.samefile(file.parent / "there")


@pytest.mark.parametrize("calls", [0, 1])
def test_where_the_kernel_does_not_copy_it_is_done_here(
    file: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """At once, or from where it stopped."""
    copy = os.copy_file_range
    left = [upload.CHUNK] * calls

    def stop_soon(source: int, target: int, count: int) -> int:
        return copy(source, target, left.pop()) if left else refuse()

    monkeypatch.setattr(os, "copy_file_range", stop_soon)
    assert upload_file(file, HERE, str(file.parent / "there"), keep=True) == SUMS
    assert (file.parent / "there").read_bytes() == CONTENT


def test_a_file_of_several_names_is_copied(file: Path) -> None:
    """As in the caches of models, which outlive the folder that is given up."""
    soft, hard = file.parent / "soft", file.parent / "hard"
    soft.symlink_to(file)
    hard.hardlink_to(file)
    for name in (soft, hard):
        there = file.parent / f"{name.name} there"
        assert upload_file(name, HERE, str(there), keep=False) == SUMS
        assert not there.is_symlink()
        assert not there.samefile(file)


def test_what_a_killed_rank_had_linked_is_no_longer_the_same_file(file: Path) -> None:
    target = file.parent / "there"
    target.hardlink_to(file)
    for keep in (False, True):
        assert upload_file(file, HERE, str(target), keep=keep) == SUMS
        assert target.read_bytes() == file.read_bytes() == CONTENT
    assert not target.samefile(file)
