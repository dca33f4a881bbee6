"""Which runs a zygote fits, and what makes it unfit."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from distributor.node.process.zygote import PreloadSpec, have_changed, loaded_files

NAME = "module_whose_file_changes"


@pytest.mark.parametrize(
    "variable",
    [
        "PYTHONHASHSEED",
        "PYTHONUTF8",
        "LC_ALL",
        "LANG",
        "LD_LIBRARY_PATH",
        "MALLOC_ARENA_MAX",
        "OMP_PROC_BIND",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "TORCH_LOGS",
        "PYTORCH_CUDA_ALLOC_CONF",
        "TORCHDYNAMO_SUPPRESS_ERRORS",
        "TORCHINDUCTOR_MAX_AUTOTUNE",
    ],
)
def test_a_variable_that_is_read_at_start_makes_it_unfit(variable: str) -> None:
    without, one, other = (
        PreloadSpec.of({"HOME": "/", **more}, ()) for more in ({}, {variable: "1"}, {variable: "2"})
    )
    for made in (without, one, other):
        assert [made.covers(wanted) for wanted in (without, one, other)].count(True) == 1
        assert made.covers(made)


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "TZ", "MASTER_PORT", "OF_THE_USER"])
def test_a_variable_that_a_forked_rank_can_apply_does_not(variable: str) -> None:
    without, one = (
        PreloadSpec.of({"HOME": "/"}, ()),
        PreloadSpec.of({"HOME": "/", variable: "1"}, ()),
    )
    assert without.covers(one)
    assert one.covers(without)


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


def test_a_successor_imports_the_same_modules_only_in_the_same_interpreter() -> None:
    made = PreloadSpec.of({}, ("json",))
    assert made.preload_for_successor(PreloadSpec.of({"LANG": "C"}, ())) == ("json",)
    assert made.preload_for_successor(replace(made, executable="/elsewhere/bin/python")) == ()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Import a module, and return its file."""
    path = tmp_path / f"{NAME}.py"
    path.write_text("VALUE = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module(NAME)
    yield path
    del sys.modules[NAME]


def test_files_of_imported_modules_are_recorded(path: Path) -> None:
    files = loaded_files()
    assert {str(path), __file__, os.__file__} <= set(files)
    assert not have_changed(files)


def test_a_new_size_is_a_change(path: Path) -> None:
    files, before = loaded_files(), path.stat()
    path.write_text("VALUE = 12")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert have_changed(files)


def test_a_new_modification_time_is_a_change(path: Path) -> None:
    files, before = loaded_files(), path.stat()
    path.write_text("VALUE = 2")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))
    assert have_changed(files)


def test_a_removed_file_is_a_change(path: Path) -> None:
    files = loaded_files()
    path.unlink()
    assert have_changed(files)


def test_an_archive_on_the_path_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "modules.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("archived.py", "VALUE = 1")
    monkeypatch.syspath_prepend(str(archive))
    assert importlib.util.find_spec("archived")
    files = loaded_files()
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("archived.py", "VALUE = 'another'")
    assert have_changed(files)
