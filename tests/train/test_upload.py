"""Files are uploaded as a copy, or as a hard link if the source is not written to again."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from distributor.train.storage.files import CHUNK, upload_file

CONTENT = os.urandom(3 * CHUNK + 7)
SIZE_AND_CHECKSUM = (len(CONTENT), zlib.crc32(CONTENT))
LOCAL = pafs.LocalFileSystem()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "model.pt"
    file.write_bytes(CONTENT)
    return file


def test_a_file_with_other_links_is_copied(file: Path) -> None:
    """As in a model cache, which remains in use after the folder is handed over."""
    soft, hard = file.parent / "soft", file.parent / "hard"
    soft.symlink_to(file)
    hard.hardlink_to(file)
    for name in (soft, hard):
        target = file.parent / f"{name.name} target"
        assert upload_file(name, LOCAL, str(target), keep=False) == SIZE_AND_CHECKSUM
        assert not target.is_symlink()
        assert not target.samefile(file)


def test_a_hard_link_left_by_a_killed_rank_is_replaced(file: Path) -> None:
    target = file.parent / "target"
    target.hardlink_to(file)
    for keep in (False, True):
        assert upload_file(file, LOCAL, str(target), keep=keep) == SIZE_AND_CHECKSUM
        assert target.read_bytes() == file.read_bytes() == CONTENT
    assert not target.samefile(file)
