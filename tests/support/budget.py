"""The budget of the project: totals that a change must not exceed.

Run as ``python tests/support/budget.py``, by ``make lint``. A feature pays for its lines: look for
what it makes unnecessary. A change that must raise a limit says so in its entry of CHANGELOG.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMITS = {
    "lines of code in distributor/": 30_799,
    "modules in distributor/": 200,
    "lines in tests/": 33_098,
}
NO_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
)


def code_lines(text: str) -> int:
    """Count the lines of a module without docstrings, comments and blank lines."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                code.difference_update(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(code)


def totals() -> dict[str, int]:
    """Return what the project has of each thing that is limited."""
    modules = [path.read_text() for path in (ROOT / "distributor").rglob("*.py")]
    tests = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    found = sum(map(code_lines, modules)), len(modules), sum(text.count("\n") for text in tests)
    return dict(zip(LIMITS, found, strict=True))


def main() -> int:
    """Print the totals; return 1 if one of them exceeds its limit."""
    found = totals()
    for name, number in found.items():
        print(f"{number:,} {name}, at most {LIMITS[name]:,}")
    return int(any(number > LIMITS[name] for name, number in found.items()))


if __name__ == "__main__":
    sys.exit(main())
