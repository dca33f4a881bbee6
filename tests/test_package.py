"""The package as such: what an import costs and needs, how the parts depend, what types say."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import distributor

PACKAGE = Path(distributor.__file__).resolve().parent
HEAVY = ("torch", "pyspark", "py4j", "mlflow", "ray", "pandas", "numpy", "pyarrow")

LAYERS = [
    {"version", "errors", "source", "_compat"},
    {"core"},
    {"serialization"},
    {"wire"},
    {"node"},
    {"launch"},
    {"runtime", "tracking"},
    {"prepared_run"},
    {"torch_distributor"},
    {"serverless", "train"},
    {"serverless_gpu", "cleaning", "cli_options"},
    {"", "cli", "demo"},
    {"__main__"},
]
"""The package's parts from the lowest; "" is ``distributor`` itself. Each may import the lower."""

EXECUTOR_SIDE = {"_compat", "core", "serialization", "wire", "node"}
"""The parts that a node imports."""

MOST_MODULES = 15
"""Modules directly in a package, beyond which it is more than one idea."""


def python(source: str, *args: str) -> str:
    """Run a program in a fresh interpreter; give what it prints."""
    # Without PYTHON* variables, site hooks and the like, but with this very package.
    start = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(source), *args],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules() -> dict[str, Path]:
    """Map every module of the package to its file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(module: str, path: Path) -> Iterator[str]:
    """List the modules of this package that one imports anywhere, be it only for its types."""
    known = modules()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            # ``from package import module`` needs the module, and else what defines the name.
            names = [name if name in known else str(node.module) for name in inside]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "distributor")


def layer(module: str) -> int:
    part = module.partition(".")[2].partition(".")[0]
    found = [index for index, parts in enumerate(LAYERS) if part in parts]
    assert found, f"{module} has no place among the layers: give it one"
    return found[0]


@functools.cache
def graph() -> dict[str, set[str]]:
    return {module: set(imported(module, path)) for module, path in modules().items()}


def test_the_graph_is_read() -> None:
    """So the next two tests can fail."""
    known = graph()
    assert len(known) > 20
    assert "distributor.node.agent.agent" in known["distributor.launch.local"]
    assert "distributor.launch.spark.launcher" in known["distributor.prepared_run"], "in a function"
    assert "distributor.serialization.pickling" in known["distributor.node.worker.main"], (
        "from a package"
    )
    assert layer("distributor") > layer("distributor.launch.local") > layer("distributor.errors")


def test_nothing_imports_upward() -> None:
    upward = [
        f"{module} imports {other}"
        for module, others in graph().items()
        for other in others
        if layer(other) > layer(module)
    ]
    assert upward == []


def test_nothing_imports_in_a_circle() -> None:
    tuple(graphlib.TopologicalSorter(graph()).static_order())


def test_no_package_is_crowded() -> None:
    counts: dict[str, int] = {}
    for path in modules().values():
        if path.name != "__init__.py":
            folder = str(path.parent.relative_to(PACKAGE.parent))
            counts[folder] = counts.get(folder, 0) + 1
    assert counts["distributor/node/process"] > 10
    assert {folder for folder, count in counts.items() if count > MOST_MODULES} == set()


def test_an_import_is_light() -> None:
    told = python(
        f"""
        import distributor
        print(sorted(set({HEAVY!r}) & set(sys.modules)), distributor.__version__)
        """
    )
    assert told == f"[] {distributor.__version__}\n"


def test_an_import_leaves_the_environment_as_it_was() -> None:
    told = python(
        """
        import os
        before = dict(os.environ)
        import distributor.launch.spark.launcher
        print(dict(os.environ) == before)
        """
    )
    assert told == "True\n"


BLOCK = """
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
for name in BLOCKED:
    try:
        __import__(name)
    except ImportError:
        pass
    else:
        sys.exit(f"{name} is not blocked")
"""


def test_it_works_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    """Neither a driver nor a rank needs torch for itself."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch is blocked in the ranks too')")
    told = python(
        f"""
        BLOCKED = ["torch"]
        {textwrap.indent(BLOCK, " " * 8).strip()}
        from distributor import TorchDistributor

        def train(x):
            import os
            try:
                import torch
            except ImportError as error:
                return x + int(os.environ["WORLD_SIZE"]), str(error)

        sys.path.insert(0, sys.argv[1])  # the ranks look where the driver does
        print(*TorchDistributor(2, local_mode=True, use_gpu=False, timeout=50).run(train, 40))
        """,
        str(tmp_path),
    )
    assert told == "42 torch is blocked in the ranks too\n"


def test_executor_side_modules_need_neither_pyspark_nor_torch() -> None:
    names = [name for name in modules() if name.count(".") and name.split(".")[1] in EXECUTOR_SIDE]
    assert {"distributor.node.spark_task.task", "distributor.wire.link"} < set(names)
    told = python(
        f"""
        BLOCKED = {HEAVY!r}
        {textwrap.indent(BLOCK, " " * 8).strip()}
        import importlib
        for name in sys.argv[1:]:
            importlib.import_module(name)
        print("all imported")
        """,
        *names,
    )
    assert told == "all imported\n"


def test_public_names_are_there_and_documented() -> None:
    for name in distributor.__all__:
        thing = getattr(distributor, name)
        assert isinstance(thing, str) or thing.__doc__, name


def test_types_ship() -> None:
    assert files("distributor").joinpath("py.typed").is_file()


SNIPPET = """
from pathlib import Path
from distributor import TorchDistributor

def train(epochs: int, *, lr: float = 0.1) -> list[str]:
    return [f"{epochs} {lr}"]

reveal_type(TorchDistributor(2).run(train, 1))  # list[str]
reveal_type(TorchDistributor(2).run(train, 1, lr=0.5))  # list[str]
reveal_type(TorchDistributor(2).run_all(train, 1))  # list[list[str]]
reveal_type(TorchDistributor(2).run(lambda: 3))  # int
reveal_type(TorchDistributor(2).run("x.py", "--epochs", 3))  # None
reveal_type(TorchDistributor(2).run(Path("x.py")))  # None
reveal_type(TorchDistributor(2).run_all("x.py"))  # list[None]
TorchDistributor(2, True, False, env={"A": "b"}, timeout=3, show_output=[0], log_dir=Path("logs"))
number: int = TorchDistributor(2).run(train, 1)  # error: assignment
TorchDistributor(2).run(train, "1")  # error: call-overload
TorchDistributor(2).run(train)  # error: call-overload
TorchDistributor(2).run(train, 1, momentum=0.9)  # error: call-arg
TorchDistributor(2).run("x.py", epochs=3)  # error: call-overload
TorchDistributor(2).run(3)  # error: call-overload
TorchDistributor("2")  # error: arg-type
TorchDistributor(2, env={"A": 1})  # error: dict-item
TorchDistributor(2, show_output="loud")  # error: arg-type
TorchDistributor(2, no_such_setting=1)  # error: call-arg
"""

MYPY_INI = """
[mypy]
strict = True
[mypy-distributor.*]
follow_imports = silent
[mypy-torch.*,pyspark.*,pyarrow.*,pandas.*,mlflow.*,ray.*,sklearn.*,cloudpickle.*]
follow_imports = skip
ignore_missing_imports = True
"""


def test_types_flow_through_run(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "snippet.py").write_text(SNIPPET)
    (tmp_path / "mypy.ini").write_text(MYPY_INI)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--show-error-codes", "--no-pretty", "snippet.py"],
        env={"MYPYPATH": str(PACKAGE.parent), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[int, Any] = {}
    for line, kind, text in re.findall(r"snippet.py:(\d+): (error|note): (.*)", done.stdout):
        if kind == "error":
            found[int(line)] = "error: " + text.rpartition("[")[2].rstrip("]")
        elif revealed := re.search('Revealed type is "(.*)"', text):
            found[int(line)] = revealed.group(1).replace("builtins.", "")
    expected = {
        number: line.rpartition("  # ")[2]
        for number, line in enumerate(SNIPPET.splitlines(), start=1)
        if "  # " in line
    }
    assert found == expected, done.stdout
