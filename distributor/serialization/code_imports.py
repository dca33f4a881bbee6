"""Which modules code imports, found without running it."""

from __future__ import annotations

import ast
import dis
import types
from collections.abc import Iterator


def imports_in_source(source: str | bytes) -> frozenset[str]:
    """Return what a file imports anywhere by full names; nothing if it is invalid Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return frozenset()
    return frozenset(_imported_names(tree))


def imports_in_code(code: types.CodeType) -> Iterator[str]:
    """Yield what a function and functions inside it import, by full names."""
    for part in nested_code(code):
        module = ""
        for instruction in dis.get_instructions(part):
            if instruction.opname == "IMPORT_NAME":
                if module := str(instruction.argval):
                    yield module
            elif instruction.opname == "IMPORT_FROM" and module:
                yield f"{module}.{instruction.argval}"


def nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code and that of functions and classes inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_code(constant)


def _imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
