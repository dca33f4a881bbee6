"""What a zygote has loaded: the user's modules, today's code, and variables read at start."""

from __future__ import annotations

import importlib
import importlib.util
import locale
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from conftest import facts_in
from support.packages import HIDING_TORCH
from support.waiting import SOON, assert_gone, until
from support.zygotes import (
    DEADLINE,
    WriteModule,
    grandparent,
    held_run,
    local,
    waiting_source,
    zygote_of,
    zygotes,
)

from distributor import DistributorError, StartTimeout, warm_up
from distributor.node.process import zygote as zygote_module
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


def test_warm_up_starts_the_zygote_in_the_background(
    write_module: WriteModule, tmp_path: Path
) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    distributor = local(preload=[write_module(waiting_source(begun, go))])
    warm_up(distributor)
    until(begun.exists, "it is loading, and no run has begun", DEADLINE)
    go.touch()
    until(begun.read_text, "it has written its process id")
    assert distributor.run(grandparent) == int(begun.read_text())


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


def test_modules_that_the_path_does_not_lead_to_are_preloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, file in (("apart", "__init__.py"), ("apart.inner", "inner.py")):
        (tmp_path / file).write_text("VALUE = 'by its file'")
        spec = importlib.util.spec_from_file_location(name, tmp_path / file)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)

    def look() -> tuple[bool, int]:
        return sys.modules["apart.inner"].VALUE == "by its file", grandparent()

    found = local(preload=["apart.inner"]).run(look)
    assert found == (True, zygote_of()), "a run without the module uses the same zygote"


@pytest.mark.parametrize(
    "when", ["at its start", pytest.param("when idle", marks=pytest.mark.slow)]
)
def test_a_change_is_noticed_even_if_other_imports_follow(
    write_module: WriteModule, tmp_path: Path, when: str
) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    name, more = write_module("VALUE = 'old'"), write_module(waiting_source(begun, go), "more")
    if when == "when idle":
        more = write_module(
            "from distributor.node.process import zygote\n"
            f"zygote.IDLE_IMPORTS, zygote.IDLE_IMPORT_SECONDS = ({more!r},), 0.01",
            "setting",
        )
    distributor = local(preload=[name, more])
    warm_up(distributor)
    until(begun.exists, "it loads more", DEADLINE)
    write_module("VALUE = 'new'")
    go.touch()
    assert distributor.run(lambda: importlib.import_module(name).VALUE) == "new"


def test_idle_imports_set_no_variables_in_ranks(write_module: WriteModule, tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    more = write_module(
        f"import os; os.environ['OF_MORE'] = '1'; open({str(loaded)!r}, 'w').close()"
    )
    setting = write_module(
        "from distributor.node.process import zygote\n"
        f"zygote.IDLE_IMPORTS, zygote.IDLE_IMPORT_SECONDS = ({more!r},), 0.01",
        "setting",
    )
    distributor = local(preload=[setting])
    warm_up(distributor)
    until(loaded.exists, "it has loaded more", DEADLINE)
    assert distributor.run(lambda: os.environ.get("OF_MORE")) is None


def test_a_rank_has_variables_of_its_own_runs_modules_only(write_module: WriteModule) -> None:
    inner = write_module("import os; os.environ['INNER'] = '1'", "inner")
    outer = write_module(f"import os, {inner}; os.environ['OUTER'] = '1'", "outer")

    def look() -> set[str]:
        return {"OUTER", "INNER"} & set(os.environ)

    assert local(preload=[outer, inner]).run(look) == {"OUTER", "INNER"}
    zygote = zygote_of()
    assert "INNER" in local(preload=[inner]).run(look)
    assert local().run(look) == set()
    assert zygote_of() == zygote


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param(
            "def fail():\n    raise LookupError('on purpose')\nfail()",
            "line 2, in fail\n    raise LookupError('on purpose')\nLookupError: on purpose",
            id="raises",
        ),
        pytest.param(
            "import sys; sys.exit('日' * 40_000)",
            "日日日",
            id="exits with a long message",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_clear_error(
    write_module: WriteModule, source: str, expected: str
) -> None:
    name = write_module(source)
    with pytest.raises(DistributorError, match=f"{name} cannot be imported") as caught:
        local(2, preload=[name]).run(os.getppid)
    assert expected in str(caught.value)
    until(lambda: not zygotes(), "a zygote is left")


@pytest.mark.slow
def test_an_import_error_affects_only_runs_that_preload_the_module(
    write_module: WriteModule, tmp_path: Path
) -> None:
    tried = tmp_path / "tried"
    name = write_module(f"open({str(tried)!r}, 'w').close(); raise ValueError('on purpose')")
    warm_up(local(preload=[name]))
    until(tried.exists, "it has been tried", DEADLINE)
    assert local().run(len, "abc") == 3


@pytest.mark.slow
def test_an_import_error_that_was_fixed_before_the_run_is_not_raised(
    write_module: WriteModule, tmp_path: Path
) -> None:
    tried = tmp_path / "tried"
    name = write_module(f"open({str(tried)!r}, 'w').close(); raise ValueError('on purpose')")
    distributor = local(preload=[name])
    warm_up(distributor)
    until(tried.exists, "it has been tried", DEADLINE)
    write_module("VALUE = 'mended'")
    assert distributor.run(lambda: sys.modules[name].VALUE) == "mended"


def test_side_effects_of_an_import_do_not_show_in_ranks(
    write_module: WriteModule, tmp_path: Path
) -> None:
    name = write_module(
        "import ctypes, tempfile\n"
        "print('from Python'); ctypes.CDLL(None).puts(b'from C')\n"
        "tempfile.gettempdir()  # as torch._dynamo does, which a zygote loads by itself"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    zygote_of(preload=[name])  # its temporary folder is not this one

    def look() -> str:
        print("from the rank")
        return tempfile.gettempdir()

    settings: dict[str, Any] = {"env": {"TMPDIR": str(temporary)}, "log_dir": tmp_path / "logs"}
    found = local(2, preload=[name], **settings).run_all(look)
    printed = {path.name: path.read_text() for path in tmp_path.glob("logs/*/*/*.stdout")}
    assert printed == dict.fromkeys(["rank0.stdout", "rank1.stdout"], "from the rank\n")
    assert found == [str(temporary)] * 2


def test_an_import_that_never_ends_exceeds_start_timeout(
    write_module: WriteModule, tmp_path: Path
) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    name = write_module(waiting_source(begun, go))
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(local(preload=[name], start_timeout=1.0).run, os.getppid)
        try:
            assert isinstance(run.exception(timeout=SOON), StartTimeout)
        finally:
            go.touch()


def test_an_idle_zygote_exits(write_module: WriteModule) -> None:
    name = write_module(
        "from distributor.node.process import zygote\n"
        "zygote.IDLE_IMPORTS, zygote.IDLE_EXIT_SECONDS = (), 0.2  # this runs in the zygote"
    )
    assert_gone([zygote_of(preload=[name])])


def test_a_relative_path_is_relative_to_the_ranks_folder(run_driver: Any, tmp_path: Path) -> None:
    for folder in ("one", "other"):
        (tmp_path / folder / "lib").mkdir(parents=True)
        (tmp_path / folder / "lib" / "beside.py").write_text(f"FOLDER = {folder!r}")
    done = run_driver("""
        import json, os, sys
        from distributor import TorchDistributor


        def load():
            import beside

            return beside.FOLDER


        sys.path.append("lib")
        os.chdir("one")
        distributor = TorchDistributor(local_mode=True, use_gpu=False, warm=True)
        found = [distributor.run(load)]
        os.chdir("../other")
        found.append(distributor.run(load))
        print("FACTS " + json.dumps({"found": found}))
    """)
    assert facts_in(done)["found"] == ["one", "other"]


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


def test_a_zygote_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`warm_up` replaces it in the background, unless a run has already done so."""
    zygote_of(preload=["colorsys"])
    start, found_stale, replaced = zygote_module._start_zygote, threading.Event(), threading.Event()

    def start_late(zygote_spec: Any) -> Any:
        if threading.current_thread().name != "node":
            found_stale.set()
            replaced.wait(DEADLINE)
        return start(zygote_spec)

    monkeypatch.setattr(zygote_module, "_start_zygote", start_late)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    before = set(threading.enumerate())
    distributor = local()
    warm_up(distributor)
    (background,) = set(threading.enumerate()) - before
    assert found_stale.wait(DEADLINE)
    zygote = distributor.run(grandparent)
    replaced.set()
    background.join(DEADLINE)
    assert zygote_of() == zygote


def threads_by_library() -> list[tuple[str, int]]:
    import torch
    from threadpoolctl import threadpool_info

    pools = [(pool["internal_api"], pool["num_threads"]) for pool in threadpool_info()]
    return sorted([*pools, ("torch", torch.get_num_threads())])


@pytest.mark.slow
def test_a_librarys_own_variable_sets_its_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch = [folder for folder in sys.path if folder != HIDING_TORCH]
    monkeypatch.setattr(sys, "path", with_torch)
    env = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    zygote = zygote_of(2, env=env)
    assert zygote_of(env={**env, "OMP_NUM_THREADS": "2"}) == zygote
    env["OMP_NUM_THREADS"] = "2"
    found = local(env=env).run(threads_by_library)
    assert found == local(env=env, warm=False).run(threads_by_library)
