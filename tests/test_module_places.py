"""Ranks find the modules that the driver has imported, from wherever it has imported them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
from conftest import facts_in, needs_java

RunDriver = Callable[..., "subprocess.CompletedProcess[str]"]

PLACES = """
import compileall, importlib, importlib.util, json, os, pathlib, sys, types, zipfile
from distributor import TorchDistributor

here = pathlib.Path.cwd()

def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path

def from_file(name, path, folders=None):
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

before = here / "before"
answer = "def answer(): return __name__, {!r}"
write(before / "in_cwd.py", answer.format("in_cwd"))
for name in ("in_relative", "lazy"):
    write(before / "src" / f"{name}.py", answer.format(name))
write(before / "package" / "__init__.py", "from package.part import answer")
write(before / "package" / "part.py", "from . import late; answer = late.answer")
write(before / "package" / "late.py", answer.format("a submodule"))
write(before / "split" / "one.py", answer.format("one"))
write(before / "src" / "split" / "two.py", answer.format("two"))
write(before / "src" / "compiled.py", answer.format("compiled"))
compileall.compile_dir(before / "src", quiet=1, legacy=True)
(before / "src" / "compiled.py").unlink()
other = write(here / "files" / "other-name.py", answer.format("a file of another name"))
code = write(here / "files" / "code.py", answer.format("a package of another name"))
write(here / "files" / "inner.py", answer.format("inside it"))
with zipfile.ZipFile(here / "lib.zip", "w") as archive:
    archive.writestr("zipped/__init__.py", "from zipped.inner import answer")
    archive.writestr("zipped/inner.py", answer.format("in an archive"))
    archive.writestr("zipped_alone.py", answer.format("alone in it"))
linked = write(here / "linked" / "inside.py", answer.format("behind a link"))
(before / "package" / "link").symlink_to(linked.parent)
(before / "package" / "loop").symlink_to("..")

os.chdir(before)
sys.path[:0] = ["", "src", str(here / "lib.zip")]
import in_cwd, in_relative, package, split.one, split.two, compiled, zipped, zipped_alone
from package.link import inside
sys.dont_write_bytecode = True
os.chdir(here)
modules = [in_cwd, in_relative, package, split.one, split.two, compiled, zipped, zipped_alone]
sys.modules["plugins"] = types.ModuleType("plugins")
modules += [inside, from_file("by_file", other), from_file("plugins.by_file", other)]
modules.append(from_file("outer", code, [str(code.parent)]))

def ask_all():
    from outer import inner
    import lazy
    return [module.answer()[1] for module in modules + [inner, lazy]]

def by_reference():
    return [function()[1] for function in functions]

functions = [module.answer for module in modules]
if __name__ == "__main__":
    local, warm = "local" in sys.argv, "warm" in sys.argv
    if not local:
        from pyspark.sql import SparkSession
        builder = SparkSession.builder.master("local-cluster[1,2,1024]")
        spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    options = dict(local_mode=local, use_gpu=False, warm=warm)
    here_too = ask_all()
    ranks = TorchDistributor(2, **options)
    facts = {"here": here_too, "ranks": ranks.run_all(ask_all), "pickled": ranks.run(by_reference)}

    print("FACTS " + json.dumps(facts))
"""

MODES = [
    pytest.param("local", "warm"),
    pytest.param("cluster", "warm", marks=[pytest.mark.slow, pytest.mark.spark, needs_java]),
]


@pytest.mark.parametrize(("mode", "start"), MODES)
def test_modules_are_found_where_the_driver_has_found_them(
    run_driver: RunDriver, mode: str, start: str
) -> None:
    done = run_driver(PLACES, mode, start)
    facts = facts_in(done)

    expected = [
        *("in_cwd", "in_relative", "a submodule", "one", "two", "compiled", "in an archive"),
        *("alone in it", "behind a link", "a file of another name", "a file of another name"),
        "a package of another name",
    ]
    assert facts["here"] == [*expected, "inside it", "lazy"]
    assert facts["ranks"] == [facts["here"]] * 2
    assert facts["pickled"] == expected
