"""The package: cost of its import, dependencies of its parts, docstrings and types."""

from __future__ import annotations

import ast
import functools
import graphlib
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import distributor
from distributor import (
    air,
    runtime,
)
from distributor.ray import RayFunction, ray_launch
from distributor.serverless import DistributedFunction

pytestmark = pytest.mark.repository

PACKAGE = Path(distributor.__file__).resolve().parent
HEAVY = ("torch", "pyspark", "py4j", "mlflow", "ray", "pandas", "numpy", "pyarrow", "optuna")

LAYERS = [
    {"version", "errors", "serverless_errors", "source", "_compat"},
    {"core"},
    {"filesystems", "rank"},
    {"serialization"},
    {"wire"},
    {"policies"},
    {"node"},
    {"screen"},
    {"spark"},
    {"data", "settings"},
    {"programs"},
    {"run_spec"},
    {"report"},
    {"control"},
    {"launchers"},
    {"runtime", "tracking", "unsupported"},
    {"torch_distributor"},
    {"deepspeed_distributor", "serverless", "train"},
    {"ml", "ray", "tune"},
    {"serverless_gpu", "air", "diagnosis"},
    {"", "cli", "demo"},
    {"__main__"},
]
"""The package's parts, lowest first; "" is ``distributor`` itself. Each may import lower parts."""

COMPAT = "distributor._compat"
DOCUMENTED = {"_asdict", "_exit", "_fields", "_replace"}
"""Names of the standard library that begin with an underscore and are documented."""

EXECUTOR_SIDE = {"_compat", "core", "rank", "serialization", "wire", "policies", "node"}
"""The parts that a node imports."""


def python(source: str, *args: str) -> str:
    """Run a program in a new interpreter that finds this package, and return what it prints."""
    start = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(source), *args],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def modules() -> dict[str, Path]:
    """Map every module of the package to its file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(module: str, path: Path) -> Iterator[str]:
    """Yield the modules of this package that a module imports, in functions and for types too."""
    known = modules()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            # ``from package import name`` imports a module, or a name that the package defines.
            names = [name if name in known else str(node.module) for name in inside]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "distributor")


def layer(module: str) -> int:
    part = module.partition(".")[2].partition(".")[0]
    found = [index for index, parts in enumerate(LAYERS) if part in parts]
    assert found, f"{module} is in none of the LAYERS: add it"
    return found[0]


@functools.cache
def graph() -> dict[str, set[str]]:
    return {module: set(imported(module, path)) for module, path in modules().items()}


def test_nothing_imports_upward() -> None:
    assert "distributor.launchers.spark.launcher" in graph()["distributor.torch_distributor"]
    upward = [
        f"{module} imports {other}"
        for module, others in graph().items()
        for other in others
        if layer(other) > layer(module)
    ]
    assert upward == []


def test_nothing_imports_in_a_circle() -> None:
    """Modules, or what lies below a name of so many parts."""
    for depth in (2, 3, 4, 9):
        parts: dict[str, set[str]] = {}
        for module, others in graph().items():
            own = ".".join(module.split(".")[:depth])
            found = parts.setdefault(own, set())
            found |= {".".join(other.split(".")[:depth]) for other in others} - {own}
        tuple(graphlib.TopologicalSorter(parts).static_order())


def folder_of(module: str) -> str:
    return module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]


def test_no_folders_import_each_other_in_a_circle() -> None:
    """The modules of each folder, without its subfolders, are one node. The root re-exports."""
    folders: dict[str, set[str]] = {}
    for module, others in graph().items():
        own = folder_of(module)
        found = folders.setdefault(own, set())
        found |= {folder_of(other) for other in others} - {own, "distributor"}
    del folders["distributor"]
    assert "distributor.node.agent" in folders["distributor.node"]
    tuple(graphlib.TopologicalSorter(folders).static_order())


def test_every_module_is_used() -> None:
    """By an import, or by its name in a string, unless users or interpreters start with it."""
    known = graph()
    used = set().union(*known.values())
    source = "\n".join(path.read_text() for path in modules().values())
    unused = {
        module
        for module in known
        if module not in used
        and not any(other.startswith(f"{module}.") for other in known)
        and not re.search(rf"\b{re.escape(module)}[:\"']", source)
    }
    assert "distributor.__main__" in unused, "otherwise this could not fail"
    public = ("distributor.air.", "distributor.serverless_gpu.", "distributor.train.")
    assert {module for module in unused if not module.startswith(public)} == {
        "distributor.__main__",
        "distributor.node.bootstrap",
        "distributor.spark.daemon",
    }


def foreign_private_names(module: str, path: Path, own: set[str]) -> Iterator[str]:
    """List the private names of other packages that a module refers to."""

    def is_private(name: str) -> bool:
        return any(re.match(r"_[a-zA-Z]", part) for part in name.split("."))

    for node in ast.walk(ast.parse(path.read_text())):
        found: list[str] = []
        if isinstance(node, ast.Attribute) and node.attr not in own:
            found = [node.attr]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            strings = (arg.value for arg in node.args if isinstance(arg, ast.Constant))
            if node.func.id in ("getattr", "setattr", "hasattr"):
                found = [name for name in strings if isinstance(name, str) and name not in own]
        for name in found:
            if is_private(name) and not name.startswith("distributor.") and name not in DOCUMENTED:
                yield f"{module}:{node.lineno} uses {name}"


def names_defined_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) in ("self", "cls")
        ):
            yield node.attr


def test_private_names_of_other_packages_are_in_compat_only() -> None:
    ours = {name: path for name, path in modules().items() if not name.startswith(COMPAT)}
    own = {name for path in ours.values() for name in names_defined_in(path)}
    used = [use for name, path in ours.items() for use in foreign_private_names(name, path, own)]
    assert used == []


def test_compat_imports_nothing_of_this_package() -> None:
    assert {
        (module, other)
        for module, others in graph().items()
        for other in others
        if module.startswith(COMPAT) and not other.startswith(COMPAT)
    } == set()


def test_an_import_is_light() -> None:
    output = python(
        f"""
        import os
        before = dict(os.environ)
        import distributor, distributor.air, distributor.serverless_gpu
        print(sorted(set({HEAVY!r}) & set(sys.modules)), dict(os.environ) == before)
        """
    )
    assert output == "[] True\n"


def test_modules_on_executors_need_neither_pyspark_nor_torch() -> None:
    names = [
        name
        for name in modules()
        if (name.split(".")[1:2] and name.split(".")[1] in EXECUTOR_SIDE)
        or name.startswith("distributor.launchers.spark.task")
    ]
    assert {"distributor.launchers.spark.task.task", "distributor.wire.tcp_link"} < set(names)
    output = python(
        f"""
        import importlib
        sys.modules.update(dict.fromkeys({HEAVY!r}))  # None: an import is an error
        for name in sys.argv[1:]:
            importlib.import_module(name)
        print("all imported")
        """,
        *names,
    )
    assert output == "all imported\n"


OBJECTS = {name: getattr(distributor, name) for name in distributor.__all__}
CALLABLES = {
    **{name: thing for name, thing in OBJECTS.items() if callable(thing)},
    **{
        f"{name}.{method}": function
        for name, thing in OBJECTS.items()
        if isinstance(thing, type)
        for method, function in vars(thing).items()
        if not method.startswith("_") and inspect.isfunction(function)
    },
    **{
        f"runtime.{name}": function
        for name, function in inspect.getmembers(runtime, inspect.isfunction)
        if function.__module__ == runtime.__name__
    },
    **{
        f"{kind.__name__}.{method}": getattr(kind, method)
        for kind in (DistributedFunction, RayFunction)
        for method in ("distributed", "distributed_async", "with_overrides")
    },
    **(
        {"tune.optimize": import_module("distributor.tune").optimize} if find_spec("optuna") else {}
    ),
    "air.ray_init": air.ray_init,
    "ray.ray_launch": ray_launch,
}


@pytest.mark.parametrize("name", sorted(CALLABLES))
def test_public_names_document_their_parameters_and_values(name: str) -> None:
    function = CALLABLES[name]
    documented = documented_sections(function)
    parameters = parameters_of(function)
    entries = documented.get("Parameters", "") + documented.get("Other Parameters", "")
    found = {
        parameter.strip().lstrip("*")
        for names in re.findall(r"^(\*{0,2}\w[\w, *]*?)(?: :.*)?$", entries, re.MULTILINE)
        for parameter in names.split(",")
    }
    assert parameters - found == set(), "parameters without a description"
    if "Other Parameters" not in documented:
        assert found - parameters == set(), "descriptions of parameters that do not exist"
    returns = getattr(function, "__annotations__", {}).get("return", "None")
    if inspect.isfunction(function) and returns not in ("None", None):
        assert "Returns" in documented


def documented_sections(thing: Any) -> dict[str, str]:
    """Return the sections of a numpydoc docstring, by their titles."""
    text = inspect.cleandoc(thing.__doc__ or "")
    assert text, "it has no docstring"
    parts = re.split(r"^(\w[\w ]*)\n-{3,}\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def parameters_of(thing: Any) -> set[str]:
    """Return the names of a function's parameters, or of a class's constructor."""
    inherited = isinstance(thing, type) and "__init__" not in vars(thing)
    if inherited and issubclass(thing, Exception) and not issubclass(thing, TimeoutError):
        return set()  # the message alone
    return set(inspect.signature(thing).parameters) - {"self"}
