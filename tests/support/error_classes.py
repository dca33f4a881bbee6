"""The exceptions of the package, found in its source."""

from __future__ import annotations

import ast
import builtins
import importlib
from pathlib import Path

import distributor

SOURCE = Path(distributor.__file__).parent


def error_classes() -> dict[str, type[BaseException]]:
    """Return all exceptions of the package that are not private, by name.

    Those of Databricks' APIs are listed with the names of these.
    """
    files_of_package = set(SOURCE.rglob("*.py")) - {SOURCE / "serverless_errors.py"}
    sources = {file: file.read_text() for file in files_of_package}
    classes = [
        (statement, file)
        for file, source in sources.items()
        if "\nclass " in source
        for statement in ast.parse(source).body
        if isinstance(statement, ast.ClassDef)
    ]
    # Only their modules are imported: others import frameworks, which takes seconds.
    names = {name for name, thing in vars(builtins).items() if _is_error(thing)}
    files: dict[str, Path] = {}
    while found := {
        c.name: file for c, file in classes if c.name not in names and names & _bases(c)
    }:
        names |= set(found)
        files |= found
    things = {name: getattr(_imported(file), name) for name, file in files.items()}
    return {name: thing for name, thing in things.items() if name[0] != "_" and _is_error(thing)}


def _is_error(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, BaseException)


def _bases(statement: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).rpartition(".")[2] for base in statement.bases}


def _imported(file: Path) -> object:
    module = ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts)
    return importlib.import_module(module.removesuffix(".__init__"))
