"""A value that cannot reach the driver is saved so that no other user can read or replace it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributor.errors import ValueTooLarge
from distributor.launchers.spark.task.task_data import save_refused_values
from distributor.serialization import pickling
from distributor.serialization.oob_pickle import anonymous_file
from distributor.serialization.outcome import Value, load_value

NAME = "20240229-120000-0123abcd-value-of-rank-3"


def save(log_dir: Path | None, returned: object) -> None:
    share = SimpleNamespace(run_id=NAME[:24])
    spec: Any = SimpleNamespace(log_dir=log_dir and str(log_dir), share=share)
    value = Value(3, anonymous_file())
    pickling.dump_value(returned, value.file, what="rank 3")
    with pytest.raises(ValueTooLarge, match="It is saved on"):
        save_refused_values([value], {3: 0}, spec)


@pytest.fixture
def open_to_all() -> Any:
    mask = os.umask(0)
    yield
    os.umask(mask)


@pytest.mark.parametrize("in_log_dir", [False, True])
def test_only_this_user_can_read_a_saved_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_to_all: None, in_log_dir: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    logs = tmp_path / "logs"
    logs.mkdir(mode=0o775)
    target = tmp_path / "of the user"
    target.write_text("precious")
    (tmp_path / NAME).symlink_to(target)
    path = logs / NAME[:24] / NAME if in_log_dir else tmp_path / NAME
    save(logs if in_log_dir else None, "first")
    save(logs if in_log_dir else None, "of the next attempt")
    assert load_value(path) == "of the next attempt"
    assert target.read_text() == "precious", "a link is replaced and not followed"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent).count(NAME) == 1
    assert logs.stat().st_mode & 0o777 == 0o775, "it is the user's"
