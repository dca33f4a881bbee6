"""Files and folders appear under their final name complete, or not at all."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distributor.core.files import atomic_path, write_atomically

KILLED_WHILE_WRITING = """
import os, signal, sys
from distributor.core.files import atomic_path
with atomic_path(sys.argv[1], partial=sys.argv[2]) as partial:
    partial.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_by_a_whole_one_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "state"
    write_atomically(file, b"old")

    def fail_midway() -> None:
        with atomic_path(file) as partial:
            partial.write_bytes(b"ne")
            raise ValueError("the disk is full")

    with pytest.raises(ValueError, match="disk"):
        fail_midway()
    assert file.read_bytes() == b"old"
    write_atomically(file, b"new")
    assert file.read_bytes() == b"new"
    assert names_in(tmp_path) == ["state"]


def test_a_folder_appears_when_it_is_complete_and_the_first_writer_wins(tmp_path: Path) -> None:
    folder = tmp_path / "modules"
    with atomic_path(folder) as slow:
        slow.mkdir()
        (slow / "slow").touch()
        with atomic_path(folder) as fast:
            fast.mkdir()
            (fast / "a.py").touch()
            assert not folder.exists()
            (fast / "b.py").touch()
    assert names_in(folder) == ["a.py", "b.py"]
    assert names_in(tmp_path) == ["modules"]


def test_files_left_by_a_killed_writer_are_removed(tmp_path: Path) -> None:
    file, partial = tmp_path / "state", tmp_path / "state.half"
    command = [sys.executable, "-c", KILLED_WHILE_WRITING, str(file), str(partial)]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert names_in(tmp_path) == ["state.half"]

    with atomic_path(file, partial) as path:
        assert not path.exists()
        path.write_text("whole")

    assert file.read_text() == "whole"
    assert names_in(tmp_path) == ["state"]
