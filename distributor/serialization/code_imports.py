"""Which modules code imports, found without running it."""

from __future__ import annotations

import ast
import dis
import types
from collections.abc import Iterator


def imports_in_source(source: str | bytes) -> frozenset[str]:
    """List the top-level modules that a file imports anywhere; none if it is no valid Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return frozenset()
    return frozenset(name.partition(".")[0] for name in _statements(tree))


def imports_in_code(code: types.CodeType) -> Iterator[str]:
    """List the top-level modules that a function imports, with those of functions inside it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME" and instruction.argval:
            yield str(instruction.argval).partition(".")[0]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from imports_in_code(constant)


def _statements(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
