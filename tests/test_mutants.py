"""The table of `make mutants` fits the code, and a mutant that no test notices is reported."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
from support.mutant_table import MUTANTS, Mutant
from support.mutants import ROOT, mutated, outcome_of

pytestmark = pytest.mark.repository


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.promise)
def test_a_mutant_fits_the_code_and_names_a_test(mutant: Mutant) -> None:
    source = (ROOT / mutant.path).read_text()
    ast.parse(mutated(source, mutant))
    file, _, name = mutant.test.partition("[")[0].partition("::")
    assert name in names_in(ROOT / "tests" / file), f"there is no {mutant.test}"


@functools.cache
def names_in(path: Path) -> set[str]:
    """Return the names of the tests of a file that `make test` runs."""
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and "pytest.mark.slow" not in map(ast.unparse, node.decorator_list)
    }


def test_each_mutant_is_another_one() -> None:
    assert len({mutant.promise for mutant in MUTANTS}) == len(MUTANTS)


TESTS = """
import os, time
from distributor.numbers import double, triple

def test_double():
    assert double(2) == 4

def test_triple():
    while triple(2) != 6:
        time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("old", "new", "outcome"),
    [
        ("2 * x", "x + 3", "noticed"),
        ("2 * x", "x + x", "NOT NOTICED"),
        ("3 * x", "x", "HUNG"),
    ],
)
def test_the_outcome_of_a_mutant(tmp_path: Path, old: str, new: str, outcome: str) -> None:
    test = "test_double" if old == "2 * x" else "test_triple"
    mutant = Mutant("", "distributor/numbers.py", old, new, f"test_numbers.py::{test}")
    seconds = 2.0 if outcome == "HUNG" else 60.0
    assert outcome_of(mutant, project(tmp_path), seconds)[0] == outcome


def project(folder: Path) -> Path:
    """Make a small project."""
    for name in ("distributor", "tests"):
        (folder / name).mkdir()
    functions = ("def double(x):\n    return 2 * x\n", "def triple(x):\n    return 3 * x\n")
    (folder / "distributor" / "__init__.py").touch()
    (folder / "distributor" / "numbers.py").write_text("".join(functions))
    (folder / "tests" / "test_numbers.py").write_text(TESTS)
    (folder / "setup.cfg").write_text("[tool:pytest]\nmarkers =\n    slow: slow\n")
    return folder
