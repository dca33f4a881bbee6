"""The user's own modules are on the ranks what they are beside the notebook."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import facts_in, needs_java

from distributor.launch import modules
from distributor.launch.modules import own_modules
from distributor.wire.room import in_bytes

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

builder = SparkSession.builder.master("local-cluster[2,1,1024]")
spark = builder.config("spark.ui.enabled", "false").getOrCreate()
ranks = TorchDistributor(2, local_mode=False, use_gpu=False, warm=sys.argv[1] == "warm")

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

(here / "train.py").write_text("import json, alone; print('SCRIPT', alone.value)")
aside = here / "aside"
aside.mkdir()
(here / "train.py").rename(aside / "train.py")
(aside / "alone.py").write_text("value = 'beside the script'")
ranks.run(str(aside / "train.py"))
print("FACTS " + json.dumps(facts))
"""


@pytest.mark.spark
@needs_java
@pytest.mark.parametrize("start", ["warm", pytest.param("fresh", marks=pytest.mark.slow)])
def test_a_changed_module_is_the_changed_one_on_executors(
    run_driver: RunDriver, start: str
) -> None:
    done = run_driver(CHANGING, start)
    facts = facts_in(done)

    first, again, changed = facts["first"], facts["again"], facts["changed"]
    expected = {"alone": "alone", "data": "data beside it", "here": False}
    for found, answer in ((first, "first"), (again, "first"), (changed, "second")):
        for rank in found:
            assert rank == {**rank, **expected, "answer": answer, "child": answer}
    assert facts["by reference"] == ["first"] * 2
    assert {r["folder"] for r in first} == {r["folder"] for r in again}, "unpacked once"
    assert done.stdout.count("SCRIPT beside the script") == 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder that alone is searched for modules."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_modules_and_packages_travel_and_nothing_else(folder: Path) -> None:
    expected = {
        "one.py": write(folder / "one.py"),
        "package/__init__.py": write(folder / "package" / "__init__.py"),
        "package/deep/two.py": write(folder / "package" / "deep" / "two.py"),
        "package/small.json": write(folder / "package" / "small.json", "{}"),
    }
    write(folder / "package" / "large.bin", "a" * modules.LARGE_FILE)
    write(folder / "package" / "__pycache__" / "two.pyc")
    write(folder / "no package" / "three.py")
    write(folder / "data.csv")

    assert own_modules() == expected


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_what_cannot_be_read_stays(folder: Path) -> None:
    write(folder / "secret.py").chmod(0)

    assert own_modules() == {}


def test_of_two_in_one_place_the_first_counts(folder: Path, tmp_path: Path) -> None:
    mine = write(tmp_path / "other" / "one.py")
    write(folder / "one.py")

    assert own_modules([tmp_path / "other"]) == {"one.py": mine}


def test_what_is_installed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [path for path in sys.path if modules._is_installed(Path(path))]
    assert installed
    monkeypatch.setattr(sys, "path", installed)

    assert own_modules() == {}


def test_of_a_large_folder_only_what_is_imported_travels(
    folder: Path, monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    used = write(folder / "used_here.py")
    write(folder / "unused.py", "a" * 1000)
    monkeypatch.setattr(modules, "MOST_BYTES", 999)
    module: Any = type(sys)("used_here")
    module.__file__ = str(used)
    monkeypatch.setitem(sys.modules, "used_here", module)

    assert own_modules() == {"used_here.py": used}
    [warning] = warned()
    assert f"The modules in {folder} take {in_bytes(1000)}" in warning
