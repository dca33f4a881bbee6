"""What a program leaves open when it ends is closed, as at the end of plain Python."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import inspect
import shelve
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import cloudpickle
import pytest
from conftest import cluster_is_slow
from support.ranks import Distribute
from support.zygotes import local

from distributor import WorkerDied

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def leave_open(folder: str) -> None:
    """Leave files open in globals, in a module and in an exit handler."""
    import atexit
    import bz2
    import gzip
    import os
    import shelve
    import tempfile
    import weakref
    import zipfile

    import module_of_the_program as module
    import pyarrow as pa
    import pyarrow.parquet as pq

    def note(what: str) -> None:
        with open(folder + "/notes", "a") as file:
            file.write(what + " ")

    class Noted:
        def __del__(self) -> None:
            note(os.path.basename(kept["folder"]))

    global kept
    kept = {"folder": folder}
    kept["zip"] = zipfile.ZipFile(folder + "/zip", "w")
    kept["zip"].writestr("member", "zip")
    kept["gzip"] = gzip.open(folder + "/gzip", "wt")
    kept["gzip"].write("gzip")
    kept["shelf"] = shelve.open(folder + "/shelf", writeback=True)
    kept["shelf"]["key"] = []
    kept["shelf"]["key"].append("shelf")
    table = pa.table({"column": ["parquet"]})
    kept["parquet"] = pq.ParquetWriter(folder + "/parquet", table.schema)
    kept["parquet"].write_table(table)
    kept["folder of its own"] = tempfile.TemporaryDirectory(dir=folder)
    kept["noted"] = Noted()

    class Cyclic:
        """Is freed by the garbage collector alone, with its file and the file below that."""

        file = gzip.open(folder + "/gzip in a cycle", "wt")

    kept["cyclic"] = Cyclic
    Cyclic.file.write("cycle")
    weakref.finalize(kept["noted"], note, "finalized")
    module.file = zipfile.ZipFile(folder + "/zip of a module", "w")
    module.file.writestr("member", "module")
    of_handler = bz2.open(folder + "/bz2", "wt")
    of_handler.write("bz2")
    atexit.register(of_handler.write, " of an exit handler")


def leave_hdf5_open(path: str) -> None:
    """Leave an HDF5 file open in a place that lasts."""
    import builtins

    import h5py

    builtins.file = h5py.File(path, "w")  # type: ignore[attr-defined]
    builtins.file["column"] = [1, 2, 3]  # type: ignore[attr-defined]


def check_files(folder: Path) -> None:
    names = {"notes", "zip", "gzip", "gzip in a cycle", "parquet", "zip of a module", "bz2"}
    found = {path.name for path in folder.iterdir()}
    assert {name for name in found if not name.startswith("shelf")} == names
    assert zipfile.ZipFile(folder / "zip").read("member") == b"zip"
    assert zipfile.ZipFile(folder / "zip of a module").read("member") == b"module"
    assert gzip.open(folder / "gzip", "rt").read() == "gzip"
    assert gzip.open(folder / "gzip in a cycle", "rt").read() == "cycle"
    assert bz2.open(folder / "bz2", "rt").read() == "bz2 of an exit handler"
    with shelve.open(str(folder / "shelf")) as shelf:
        assert shelf["key"] == ["shelf"]
    parquet = pytest.importorskip("pyarrow.parquet")
    assert parquet.read_table(folder / "parquet").to_pydict() == {"column": ["parquet"]}
    assert (folder / "notes").read_text().split() == ["finalized", folder.name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder for the program's files, and its module elsewhere."""
    for name in ("program", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "program" / "module_of_the_program.py").write_text("file = None\n")
    return tmp_path / "out"


@pytest.mark.parametrize("warm", [True, pytest.param(False, marks=pytest.mark.slow)])
@cluster_is_slow
def test_of_a_function(
    distribute: Distribute, folder: Path, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    monkeypatch.syspath_prepend(str(folder.with_name("program")))
    distribute(1, warm=warm).run(leave_open, str(folder))
    check_files(folder)


@pytest.mark.skipif(find_spec("h5py") is None, reason="h5py is not installed")
@cluster_is_slow
def test_of_hdf5(distribute: Distribute, tmp_path: Path) -> None:
    path = tmp_path / "file"
    distribute(1).run(leave_hdf5_open, str(path))
    h5py = pytest.importorskip("h5py")
    with h5py.File(path) as file:
        assert list(file["column"]) == [1, 2, 3]


def leave_unwritable(path: str) -> None:
    """Leave a file open that can no longer be written."""
    import builtins
    import os

    builtins.file = open(path, "w")  # type: ignore[attr-defined]
    builtins.file.write("lost")  # type: ignore[attr-defined]
    os.dup2(os.open(path, os.O_RDONLY), builtins.file.fileno())  # type: ignore[attr-defined]


@cluster_is_slow
def test_a_file_that_cannot_be_written_is_reported(
    distribute: Distribute, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    distribute(1).run(leave_unwritable, str(tmp_path / "file"))
    shown = capfd.readouterr().err
    assert f"at the end of the program in: <_io.TextIOWrapper name='{tmp_path}/file'" in shown
    assert "Bad file descriptor" in shown


SOURCE = f"""
from __future__ import annotations
import sys

{inspect.getsource(leave_open)}
if sys.version_info < (3, 14):  # which keeps exit handlers until all have run
    import atexit
    atexit.register(lambda: None)  # refers to all globals
leave_open(sys.argv[1])
"""
ENDINGS = {"return": "", "exit": "sys.exit(3)"}


@pytest.mark.parametrize("ending", ["return", pytest.param("exit", marks=pytest.mark.slow)])
@cluster_is_slow
def test_of_a_script(distribute: Distribute, folder: Path, ending: str) -> None:
    script = folder.with_name("program") / "script.py"
    script.write_text(SOURCE + ENDINGS[ending])
    with contextlib.nullcontext() if ending == "return" else pytest.raises(WorkerDied):
        distribute(1).run(script, str(folder))
    check_files(folder)


COLLECTED = """
import atexit, gc, sys

file = open(sys.argv[1], "w")
file.write("written")
atexit.register(gc.collect)

def main():  # a cycle that the globals are in
    if sys.argv[2] == "raise":
        raise LookupError("of the program")

main()
"""


@pytest.mark.parametrize("ending", ["return", "raise"])
def test_the_garbage_collector_frees_no_file_of_a_script_that_has_ended(
    tmp_path: Path, ending: str
) -> None:
    script, file = tmp_path / "script.py", tmp_path / "file"
    script.write_text(COLLECTED)
    with pytest.raises(LookupError) if ending == "raise" else contextlib.nullcontext():
        local(1).run(script, str(file), ending)
    assert file.read_text() == "written"
