"""Where large temporary files are put."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from distributor.core.resources import local_folder


def test_local_folders_of_spark_are_used_if_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path / 'missing'},{tmp_path}")
    assert local_folder() == str(tmp_path)
    monkeypatch.delenv("SPARK_LOCAL_DIRS")
    assert local_folder() == tempfile.gettempdir()
