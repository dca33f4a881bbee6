"""Ranks find the modules that the driver has imported, from wherever it has imported them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

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

    by_name = write(here / "by_name.py", "import by_file; print('SCRIPT', by_file.answer()[1])")
    TorchDistributor(1, py_modules=["by_file"], **options).run(str(by_name))
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
    assert "SCRIPT a file of another name" in done.stdout


COMPLETE = """
import importlib.machinery, importlib.metadata, importlib.util, json, logging, os, pathlib
import subprocess, sys
from pyspark.sql import SparkSession
from distributor import TorchDistributor

here, mebibyte = pathlib.Path.cwd(), 2**20
native = pathlib.Path(importlib.util.find_spec("_bisect").origin)

def write(path, content="", size=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    os.truncate(path, max(size, path.stat().st_size))
    return path

def package(folder):
    write(folder / "__init__.py", "from . import _bisect")
    write(folder / native.name, native.read_bytes(), 2 * mebibyte)
    write(folder / "libnative.so.1.2", size=2 * mebibyte)
    write(folder / "table.bin", size=2 * mebibyte)
    write(folder / "tool.sh", "#!/bin/sh\\necho a tool").chmod(0o755)
    return folder

about = "Metadata-Version: 2.1\\nName: {0}\\nVersion: 7\\n"
target = here / "target"
package(target / "installed")
write(target / "installed.libs" / "libother.so", size=2 * mebibyte)
write(target / "installed-7.dist-info" / "METADATA", about.format("installed"))
files = [path for path in target.rglob("*") if path.is_file()]
names = [path.relative_to(target).as_posix() for path in files]
names.append("installed-7.dist-info/RECORD")
write(target / "installed-7.dist-info" / "RECORD", "".join(f"{name},,\\n" for name in names))

mine = here / "project" / "mine"
package(mine)
write(here / "project" / "settings.yaml")
write(here / "project" / "beside.py")
huge = here / "project" / "huge"
write(huge / "__init__.py")
write(huge / native.name, size=70 * mebibyte)

edited = here / "repository" / "code"
write(edited / "__init__.py", "import importlib.metadata as m; version = m.version('edited')")
direct = {"url": (here / "repository").as_uri(), "dir_info": {"editable": True}}
write(target / "edited-7.dist-info" / "METADATA", about.format("edited"))
write(target / "edited-7.dist-info" / "direct_url.json", json.dumps(direct))

class Editable:
    "Finds a package as setuptools' finders of editable installations do."
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "edited":
            return importlib.util.spec_from_file_location(name, edited / "__init__.py")

sys.path[:0] = [str(target), str(here / "project")]
sys.meta_path.append(Editable)

def look():
    import edited, installed, mine
    found = {"edited": edited.version, "version": importlib.metadata.version("installed")}
    for package in (installed, mine):
        folder = pathlib.Path(package.__file__).parent
        found[package.__name__] = [
            package._bisect.bisect_right([1, 2, 3], 2),
            sorted(path.name for path in folder.glob("*.*") if path.suffix != ".pyc"),
            subprocess.run([folder / "tool.sh"], capture_output=True, text=True).stdout,
        ]
    libraries = pathlib.Path(installed.__file__).parents[1] / "installed.libs"
    return {**found, "libraries": os.listdir(libraries), "own": str(here) in installed.__file__}

def import_huge():
    import huge

def open_file(*parts):
    import beside, mine, pathlib
    pathlib.Path(beside.__file__).parent.joinpath(*parts).read_bytes()

if __name__ == "__main__":
    builder = SparkSession.builder.master("local-cluster[1,2,1024]")
    spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    ranks = TorchDistributor(1, local_mode=False, use_gpu=False)
    asking = TorchDistributor(1, local_mode=False, use_gpu=False, py_modules=["mine"])

    def failure(function, *args):
        try:
            return asking.run(function, *args) if function is look else ranks.run(function, *args)
        except (ModuleNotFoundError, FileNotFoundError) as error:
            return " ".join([str(error), *error.__notes__])

    facts = {"found": ranks.run(look), "asked": failure(look), "huge": failure(import_huge)}
    facts["data"] = failure(open_file, "mine", "table.bin")
    facts["beside"] = failure(open_file, "settings.yaml")
    print("FACTS " + json.dumps(facts))
"""


@pytest.mark.slow(ci=True)
@pytest.mark.spark
@needs_java
def test_packages_are_complete_on_executors_or_said_to_be_incomplete(
    run_driver: RunDriver, tmp_path: Path
) -> None:
    native = find_spec("_bisect")
    if native is None or native.origin is None or not native.origin.endswith(".so"):
        pytest.skip("this Python has no extension module in a file of its own")
    done = run_driver(COMPLETE)
    facts = facts_in(done)

    found, extension = facts["found"], Path(native.origin).name
    code = sorted(["__init__.py", extension, "libnative.so.1.2", "tool.sh"])
    whole = sorted([*code, "table.bin"])
    assert found == {
        "edited": "7",
        "version": "7",
        "installed": [2, whole, "a tool\n"],
        "mine": [2, code, "a tool\n"],
        "libraries": ["libother.so"],
        "own": False,
    }
    assert "mine is sent to the executors without large data: mine/table.bin." in done.stderr
    assert facts["asked"]["mine"] == [2, whole, "a tool\n"]

    assert "the package huge takes 73.4 MB: send it with py_modules=['huge']" in facts["huge"]
    assert "package huge takes 73.4 MB and is not sent" in done.stderr
    project = tmp_path / "project"
    assert f"is at {project}/mine/table.bin on the driver" in facts["data"]
    assert f"py_modules=['{project}/mine']" in facts["data"]
    assert f"py_modules=['{project}/settings.yaml']" in facts["beside"]
