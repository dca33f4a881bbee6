"""What a zygote has loaded: the user's modules, today's code, and variables read at start."""

from __future__ import annotations

import importlib
import importlib.util
import locale
import os
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
from support.waiting import assert_gone, until
from support.zygotes import (
    WriteModule,
    grandparent,
    held_run,
    local,
    zygote_of,
    zygotes,
)

from distributor import DistributorError, StartTimeout
from distributor.node.process.supervisor import is_supported

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [
    pytest.mark.skipif(not is_supported(), reason="only Linux has warm processes"),
    pytest.mark.usefixtures("modules_folder", "without_torch"),
]


def test_a_module_written_between_two_runs_is_found(modules_folder: Path) -> None:
    zygote, before = zygote_of(), modules_folder.stat()
    (modules_folder / "came.py").write_text("VALUE = 'in a folder that the zygote has read'")
    (modules_folder / "not_there_yet").mkdir()
    (modules_folder / "not_there_yet" / "came_too.py").write_text("VALUE = 'in a new folder'")
    os.utime(modules_folder, ns=(before.st_atime_ns, before.st_mtime_ns))  # as on a coarse clock

    def load() -> tuple[int, list[str]]:
        return grandparent(), [importlib.import_module(name).VALUE for name in ("came", "came_too")]

    found = ["in a folder that the zygote has read", "in a new folder"]
    assert local().run(load) == (zygote, found)


def test_a_preloaded_module_is_imported_again_only_after_a_change(
    write_module: WriteModule, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    source = f"import os; open({str(note)!r}, 'a').write(f'{{os.getpid()}} '); VALUE = "
    name = write_module(source + "'old'")
    distributor = local(2, preload=[name])

    def look() -> tuple[int, str]:
        return grandparent(), sys.modules[name].VALUE

    ((first, value),) = set(distributor.run_all(look) + distributor.run_all(look))
    assert value == "old"
    write_module(source + "'new'")
    ((second, value),) = set(distributor.run_all(look) + distributor.run_all(look))
    assert value == "new"
    assert note.read_text().split() == [str(first), str(second)]
    assert_gone([first])
    assert zygote_of() == second, "a run without the module uses it too"


def test_a_module_that_cannot_be_imported_is_one_clear_error(write_module: WriteModule) -> None:
    name = write_module("def fail():\n    raise LookupError('on purpose')\nfail()")
    with pytest.raises(DistributorError, match=f"{name} cannot be imported") as caught:
        local(2, preload=[name]).run(os.getppid)
    assert "line 2, in fail\n    raise LookupError('on purpose')\nLookup" in str(caught.value)
    until(lambda: not zygotes(), "a zygote is left")


def test_an_import_that_never_ends_exceeds_start_timeout(write_module: WriteModule) -> None:
    name = write_module("import threading\nthreading.Event().wait()")
    with pytest.raises(StartTimeout):
        local(preload=[name], start_timeout=1.0).run(os.getppid)


READ_AT_START = {
    "PYTHONHASHSEED": "7",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "LC_ALL": "C",
    "MALLOC_ARENA_MAX": "2",
}


def test_variables_read_at_start_need_a_new_zygote_and_runs_continue(tmp_path: Path) -> None:
    def look() -> tuple[int, int, str, str]:
        encoding = locale.getpreferredencoding()
        return grandparent(), hash("word"), encoding, os.environ["MALLOC_ARENA_MAX"]

    with held_run(tmp_path / "run", 2) as before:
        distributor = local(2, env=READ_AT_START)
        ((parent, *found),) = set(distributor.run_all(look) + distributor.run_all(look))
        assert parent != before.zygote
        assert before.release() == ["undisturbed"] * 2
    assert_gone([before.zygote])
    python = subprocess.run(
        [sys.executable, "-c", "print(hash('word'))"],
        env={**os.environ, **READ_AT_START},
        stdout=subprocess.PIPE,
        check=True,
    )
    assert found == [int(python.stdout), "ANSI_X3.4-1968", "2"]
