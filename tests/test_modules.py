"""Ranks import the user's own modules as they are on the driver."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import facts_in, needs_java

from distributor.core.module_search import Location, imported, is_installed
from distributor.core.resources import format_bytes
from distributor.serialization.pickling import dump_call
from distributor.serialization.program import Call, Script
from distributor.spark import user_modules
from distributor.spark.user_modules import select_modules

RunDriver = Callable[..., "subprocess.CompletedProcess[str]"]

CHANGING = """
import json, os, pathlib, subprocess, sys
from pyspark.sql import SparkSession
from distributor import TorchDistributor

here = pathlib.Path(__file__).parent
package = here / "mine"
package.mkdir()
(package / "__init__.py").write_text("from mine.answers import answer")
(package / "answers.py").write_text("def answer(): return 'first'")
(package / "words.txt").write_text("data beside it")
(here / "alone.py").write_text("value = 'alone'")

builder = SparkSession.builder.master("local-cluster[1,2,1024]")
spark = builder.config("spark.ui.enabled", "false").getOrCreate()
ranks = TorchDistributor(2, local_mode=False, use_gpu=False, warm=True)

def look():
    import importlib.resources, alone, mine
    program = "import mine; print(mine.answer())"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return {
        "answer": mine.answer(),
        "alone": alone.value,
        "data": importlib.resources.files("mine").joinpath("words.txt").read_text(),
        "child": printed.stdout.strip(),
        "here": pathlib.Path(mine.__file__).is_relative_to(here),
        "folder": str(pathlib.Path(mine.__file__).parents[1]),
    }

import mine  # by reference: the ranks import what they find
facts = {"first": ranks.run_all(look), "by reference": ranks.run_all(mine.answer)}
facts["again"] = ranks.run_all(look)
(package / "answers.py").write_text("def answer(): return 'second'")
facts["changed"] = ranks.run_all(look)

print("FACTS " + json.dumps(facts))
"""


@pytest.mark.slow
@pytest.mark.spark
@needs_java
def test_a_changed_module_is_the_changed_one_on_executors(run_driver: RunDriver) -> None:
    done = run_driver(CHANGING)
    facts = facts_in(done)

    first, again, changed = facts["first"], facts["again"], facts["changed"]
    expected = {"alone": "alone", "data": "data beside it", "here": False}
    for found, answer in ((first, "first"), (again, "first"), (changed, "second")):
        for rank in found:
            assert rank == {**rank, **expected, "answer": answer, "child": answer}
    assert facts["by reference"] == ["first"] * 2
    assert {r["folder"] for r in first} == {r["folder"] for r in again}, "unpacked once"


@pytest.fixture(autouse=True)
def modules_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the modules that this process has imported before the test."""
    before = set(sys.modules)

    def imported_now() -> Iterator[Location]:
        return (found for found in imported() if found.name not in before)

    monkeypatch.setattr(user_modules, "imported", imported_now)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that is the whole of ``sys.path``."""
    is_installed("/")  # it imports from the standard library, and caches its result
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def own_modules(first: Any = (), imports: Any = (), requested: Any = ()) -> dict[str, Path]:
    """Return the files that are sent, by their path below a folder of ``sys.path``."""
    selection = select_modules([str(folder) for folder in first], imports, requested)
    return {name: file.path for name, file in selection.files.items()}


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_imported_packages_are_sent_whole_and_others_are_not(folder: Path) -> None:
    expected = {
        "one.py": write(folder / "one.py"),
        "package/__init__.py": write(folder / "package" / "__init__.py"),
        "package/deep/two.py": write(folder / "package" / "deep" / "two.py"),
        "package/small.json": write(folder / "package" / "small.json", "{}"),
    }
    write(folder / "package" / "large.bin", "a" * user_modules.LARGE_FILE)
    write(folder / "package" / "__pycache__" / "two.pyc")
    write(folder / "other.py")
    write(folder / "another" / "__init__.py")
    write(folder / "data.csv")

    assert own_modules(imports=["one", "package", "os", "no_such_module"]) == expected


def test_modules_that_imported_modules_import_are_sent(folder: Path) -> None:
    write(folder / "one.py", "def late():\n    from two.deep import x")
    write(folder / "two" / "__init__.py")
    write(folder / "two" / "deep.py", "from . import near\ntry: import three.four as x\nexcept: 0")
    write(folder / "three" / "four.py", "import one, os.path")
    write(folder / "near.py")
    write(folder / "broken.py", "import unused; def")
    write(folder / "unused.py")

    names = ["broken.py", "one.py", "three/four.py", "two/__init__.py", "two/deep.py"]
    assert sorted(own_modules(imports=["one", "broken"])) == names


def test_the_imports_of_functions_are_found_in_the_pickled_call() -> None:
    class Model:
        def build(self) -> None:
            import three.four  # noqa: F401

    def helper() -> None:
        from two.deep import x  # noqa: F401

    def train() -> None:
        import one  # noqa: F401

        helper()

    call = dump_call(train, (Model,), {})
    assert {"one", "two.deep", "two.deep.x", "three.four"} <= call.imports


def test_the_first_match_on_the_path_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = write(tmp_path / "site-packages" / "one.py").parent
    mine = write(tmp_path / "mine" / "one.py").parent
    monkeypatch.setattr(sys, "path", [str(installed), str(mine)])
    assert own_modules(imports=["one"]) == {}
    monkeypatch.setattr(sys, "path", [str(mine), str(installed)])
    assert own_modules(imports=["one"]) == {"one.py": mine / "one.py"}


def test_requested_modules_are_sent_whole(folder: Path, tmp_path: Path) -> None:
    write(folder / "named" / "__init__.py", "import one")
    large = write(tmp_path / "aside" / "named" / "large.bin", "a" * user_modules.LARGE_FILE)
    file = write(tmp_path / "aside" / "config.yaml")
    write(folder / "one.py")

    found = own_modules(requested=["named", large.parent, str(file)])
    assert sorted(found) == ["config.yaml", "named/__init__.py", "named/large.bin", "one.py"]


@pytest.mark.parametrize(
    ("imports", "lacks", "reason"),
    [
        ((), "plugin", "nothing that runs on the ranks has an import statement for it"),
        (("large",), "large.deep.late", "the package large takes 1 kB"),
    ],
)
def test_the_hint_names_a_module_and_why_it_was_not_sent(
    folder: Path, monkeypatch: pytest.MonkeyPatch, imports: Any, lacks: str, reason: str
) -> None:
    write(folder / "plugin.py")
    write(folder / "large" / "__init__.py")
    write(folder / "large" / "unused.py", "a" * 1000)
    write(folder / "large" / "deep" / "late.py")
    monkeypatch.setattr(user_modules, "MAX_PACKAGE_BYTES", 999)
    source = "\n".join(f"import {name}" for name in imports)
    program = Script("train.py", str(folder / "train.py"), source.encode())

    error = ModuleNotFoundError(f"No module named {lacks!r}", name=lacks)
    hint = user_modules.hint(error, program, ())
    top = lacks.partition(".")[0]
    assert hint is not None
    assert f"'{lacks}' is at {folder}/{top}" in hint
    assert f"because {reason}: send it with py_modules=['{top}']" in hint


@pytest.mark.parametrize("argument", ["models/mine", "other"])
def test_the_hint_names_a_path_that_was_taken_for_a_name_of_the_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    write(folder / "models" / "mine" / "config.json")
    monkeypatch.chdir(folder)
    call = Call("train", dump_call(print, (argument,), {}))
    script = Script("train.py", str(folder / "train.py"), b"", args=("--model", argument))
    error = OSError("We couldn't connect to 'https://huggingface.co' to load the files")
    for program in (call, script):
        hint = user_modules.hint(error, program, ())
        if argument == "other":
            assert hint is None
        else:
            assert hint is not None
            assert f"On the driver 'models/mine' is {folder}/models/mine" in hint
    absolute = OSError(f"Repo id must be in the form 'repo_name': '{folder}/models/mine'.")
    hint = user_modules.hint(absolute, script, ())
    assert hint is not None
    assert "/models/mine exists on the driver, but not on the executor of this rank" in hint


def test_only_the_imported_modules_of_a_large_package_are_sent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = write(folder / "large" / "used_here.py")
    write(folder / "large" / "__init__.py")
    write(folder / "large" / "unused.py", "a" * 1000)
    monkeypatch.setattr(user_modules, "MAX_PACKAGE_BYTES", 999)
    module: Any = type(sys)("large.used_here")
    module.__file__ = str(used)
    monkeypatch.setitem(sys.modules, "large.used_here", module)

    assert own_modules(imports=["large"]) == {"large/used_here.py": used}
    [warning] = select_modules(imports=["large"]).warnings
    assert f"The package large takes {format_bytes(1000)}" in warning
