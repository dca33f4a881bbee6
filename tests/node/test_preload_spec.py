"""Which runs a zygote fits, and what makes it unfit."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from distributor.node.process.zygote import PreloadSpec, have_changed, loaded_files


@pytest.mark.parametrize(
    "variable", ["PYTHONHASHSEED", "LC_ALL", "MALLOC_ARENA_MAX", "MKL_NUM_THREADS", "TORCH_LOGS"]
)
def test_a_variable_that_is_read_at_start_makes_it_unfit(variable: str) -> None:
    without, one, other = (
        PreloadSpec.of({"HOME": "/", **more}, ()) for more in ({}, {variable: "1"}, {variable: "2"})
    )
    for made in (without, one, other):
        assert [made.covers(wanted) for wanted in (without, one, other)].count(True) == 1
        assert made.covers(made)


def test_it_fits_runs_that_preload_less_but_not_more() -> None:
    none, one, two = (PreloadSpec.of({}, preload) for preload in ((), ("json",), ("abc", "json")))
    assert [two.covers(wanted) for wanted in (none, one, two)] == [True, True, True]
    assert [one.covers(wanted) for wanted in (none, one, two)] == [True, True, False]
    assert [none.covers(wanted) for wanted in (none, one, two)] == [True, False, False]


def test_another_path_or_interpreter_makes_it_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    made = PreloadSpec.of({}, ())
    assert not made.covers(replace(made, executable="/elsewhere/bin/python"))
    monkeypatch.setattr(sys, "path", [*sys.path, "/elsewhere"])
    assert not made.covers(PreloadSpec.of({}, ()))
    assert not PreloadSpec.of({}, ()).covers(made)


def test_a_file_of_another_time_makes_it_unfit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "module_whose_file_changes.py"
    path.write_text("VALUE = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    importlib.import_module(path.stem)
    files, before = loaded_files(), path.stat()
    assert {str(path), os.__file__} <= set(files)
    assert not have_changed(files)
    path.write_text("VALUE = 2")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))
    assert have_changed(files)
