"""The documented guarantees: each names a command, and each command runs tests."""

from __future__ import annotations

import ast
import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.pages import pages

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[1]
GUARANTEES = ROOT / "docs" / "explanation" / "guarantees.md"
COMMAND = re.compile(r"`make (test|test-all|chaos)(?: ARGS=(\"[^\"]*\"|\S+))?`")


class Collected(NamedTuple):
    """A test function, and whether `make test` leaves it out."""

    name: str
    slow: bool


def promises() -> list[tuple[str, str]]:
    """Return the rows of the table of guarantees: the promise, and its commands."""
    table = GUARANTEES.read_text().partition("| promise | tests |\n")[2].partition("\n\n")[0]
    rows = [line.strip("|").rpartition(" | ") for line in table.splitlines()[1:]]
    return [(promise.strip(), commands.strip()) for promise, _, commands in rows]


def commands() -> list[tuple[str, str]]:
    """Return every command of README.md and docs/ that runs tests: its target and arguments."""
    return sorted({found for page in pages() for found in COMMAND.findall(page.read_text())})


@pytest.mark.parametrize(("promise", "proof"), promises(), ids=lambda text: text[:40])
def test_every_promise_names_a_command_that_runs_tests(promise: str, proof: str) -> None:
    found = COMMAND.findall(proof)
    assert found, f"no command proves: {promise}"
    assert COMMAND.sub("", proof).strip(" ,") == ""


@pytest.mark.parametrize(("target", "arguments"), commands())
def test_every_documented_command_selects_tests(target: str, arguments: str) -> None:
    if target == "chaos":
        return
    paths, keywords = parse(arguments)
    tests = [test for path in paths for test in collected_from(path)]
    selected = [test for test in tests if matches(test, keywords)]
    assert selected, f"no test matches {arguments}"
    assert target == "test-all" or not all(test.slow for test in selected), (
        f"`make test ARGS={arguments}` leaves out all of its tests, which are slow"
    )
    for keyword in keywords:
        assert any(keyword in test.name for test in selected), f"no test is named {keyword!r}"


def parse(arguments: str) -> tuple[list[str], list[str]]:
    """Return the paths of a command, and the keywords of its ``-k``."""
    paths: list[str] = []
    keywords: list[str] = []
    rest = iter(shlex.split(arguments.strip('"')))
    for argument in rest:
        if argument == "-k":
            keywords = next(rest).split(" or ")
        else:
            paths.append(argument)
    return paths or ["tests"], keywords


def matches(test: Collected, keywords: list[str]) -> bool:
    """Return whether pytest's ``-k`` would select a test by its name."""
    return not keywords or any(keyword in test.name for keyword in keywords)


def collected_from(path: str) -> Iterator[Collected]:
    """Yield the tests of a file or folder."""
    place = ROOT / path
    assert place.exists(), f"there is no {path}"
    for file in sorted(place.rglob("test_*.py")) if place.is_dir() else [place]:
        yield from collected_in(file)


@functools.cache
def collected_in(file: Path) -> list[Collected]:
    found = []
    tree = ast.parse(file.read_text())
    all_slow = any(
        isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "pytestmark"
        and "mark.slow" in ast.unparse(node.value)
        for node in tree.body
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = " ".join(map(ast.unparse, node.decorator_list))
            # A mark inside parametrize is of single cases.
            slow = re.search(r"mark\.slow\b(?!.*\bparam\()", marks) and "param(" not in marks
            found.append(Collected(node.name, all_slow or bool(slow)))
    return found
