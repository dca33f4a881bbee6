"""Names, signatures and members are those of the APIs that the package follows, or listed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.api_names import Surface, read_surface
from support.api_surface import (
    APIS,
    DOCUMENT,
    FITTING,
    NO_ORIGINAL,
    Api,
    Entry,
    compare,
    complaints,
    document,
    read_list,
    why_not_compared,
)

pytestmark = pytest.mark.repository

THEIRS = """
import enum

class Mode(enum.Enum):
    FAST = "fast"

class Base:
    shared = None
    def __init__(self, path, mode=Mode.FAST):
        self.path = path
    def save(self, folder, name, deep=False): ...
    @classmethod
    def load(cls, folder): ...

class Failed(Exception):
    def why(self): ...
class Hung(Failed): ...

def report(metrics, checkpoint=None, *, mode=Mode.FAST): ...
LIMIT = 3
__all__ = ["Base", "Failed", "Hung", "LIMIT", "Mode", "report"]
"""


def surface(source: str, name: str, folder: Path) -> Surface:
    """Return the surface of a module with a source, which is imported and forgotten."""
    (folder / f"{name}.py").write_text(source)
    sys.path.insert(0, str(folder))
    try:
        return read_surface([name], name)
    finally:
        sys.path.remove(str(folder))
        del sys.modules[name]


BOTH, THERE, HERE = "both", "only theirs", "only ours"
CHANGES: list[tuple[str, str, dict[str, str]]] = [
    ("", "", {}),
    (', "report"]', "]", {"report": THERE}),
    (', "report"]', ', "report", "other"]\nother = report', {"other": HERE}),
    ("LIMIT = 3", "LIMIT = 4", {"LIMIT": BOTH}),
    ("deep=False", "deep=True", {"Base.save(deep)": BOTH}),
    (", deep=False", "", {"Base.save(deep)": THERE}),
    ("self, folder, name", "self, name, folder", {"Base.save()": BOTH}),
    ("self, path, mode", "self, path, size, mode", {"Base()": BOTH, "Base(size)": HERE}),
    ("checkpoint=None, *", "*, checkpoint=None", {"report(checkpoint)": BOTH}),
    ("*, mode=", "*, one=1, mode=", {"report(one)": HERE}),
    ("    shared = None", "", {"Base.shared": THERE}),
    ("self.path = path", "self.where = path", {"Base.path": THERE, "Base.where": HERE}),
    ("    @classmethod\n    def load(cls", "    def load(self", {"Base.load": BOTH}),
    ('"fast"', '"quick"', {"Mode.FAST": BOTH}),
    ("    def why(self): ...", "    why = None", {"Failed.why": BOTH}),
    ("def why", "def who", {"Failed.why": THERE, "Failed.who": HERE}),
    ("class Hung(Failed)", "class Hung(Exception)", {"Hung": BOTH, "Hung.why": THERE}),
]


@pytest.mark.parametrize(("old", "new", "differences"), CHANGES)
def test_differences_are_found(
    tmp_path: Path, old: str, new: str, differences: dict[str, str]
) -> None:
    assert old in THEIRS
    theirs = surface(THEIRS, "original", tmp_path)
    ours = surface(THEIRS.replace(old, new), "ours", tmp_path)
    assert {key: each.where for key, each in compare(theirs, ours).items()} == differences


THEIR_SURFACE = {"kept": "function", "lost": "function", "changed": "constant 3"}
OUR_SURFACE = {"kept": "function", "changed": "constant 4", "kept(a)": "by name", "own": "module"}
TRUE = {
    "kept(*)": Entry("added", "For convenience."),
    "kept": Entry("behaves", "Faster."),
    "lost": Entry("missing", "Soon."),
    "changed": Entry("differs", "One more."),
    "own": Entry("added", "Useful."),
}


def test_a_list_of_all_differences_is_accepted() -> None:
    assert list(complaints(THEIR_SURFACE, OUR_SURFACE, TRUE, FITTING)) == []


@pytest.mark.parametrize(
    "key_and_entry",
    [
        *((key, None) for key in TRUE if key != "kept"),
        ("kept(*)", Entry("missing", "Of another kind.")),
        ("lost", Entry("added", "Of another kind.")),
        ("changed", Entry("behaves", "But its signature differs.")),
        ("own", Entry("differs", "It does not.")),
        ("own", Entry("added", "no sentence")),
        ("own", Entry("useful", "No kind.")),
        ("kept", Entry("differs", "It does not.")),
        ("kept(b)", Entry("missing", "There is none.")),
        ("own(*)", Entry("added", "There are none.")),
        ("lost", Entry("behaves", "It does not exist.")),
    ],
)
def test_a_list_that_is_not_true_is_refused(key_and_entry: tuple[str, Entry | None]) -> None:
    key, entry = key_and_entry
    entries = {**TRUE, key: entry} if entry else {**TRUE}
    if entry is None:
        del entries[key]
    found = list(complaints(THEIR_SURFACE, OUR_SURFACE, entries, FITTING))
    assert [line.partition(":")[0].partition("(")[0] for line in found] in (
        [key.partition("(")[0]],
        [key.partition("(")[0]] * 2,
    )


def test_a_list_without_an_original_names_all_of_ours() -> None:
    entries = {"kept": Entry("same", "As it was."), "lost": Entry("missing", "Soon.")}
    ours = {"kept": "function"}
    assert list(complaints({}, ours, entries, NO_ORIGINAL)) == []
    assert list(complaints({}, {**ours, "new": "function"}, entries, NO_ORIGINAL)) != []
    assert list(complaints({}, {**ours, "lost": "function"}, entries, NO_ORIGINAL)) != []
    assert list(complaints({}, {}, entries, NO_ORIGINAL)) == ["kept: is not same"]


@pytest.fixture(scope="module")
def checked() -> Any:
    """Compare with the installed packages, in a process of their own: they change theirs."""
    done = subprocess.run(
        [sys.executable, "-m", "support.api_surface", "--check"],
        env={"PYTHONPATH": str(Path(__file__).parent), "PATH": "", "HOME": ""},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.title)
def test_each_difference_is_listed(api: Api, checked: Any) -> None:
    if why := why_not_compared(api):
        pytest.skip(why)
    assert checked[api.title] == []


def test_each_section_of_the_list_is_of_an_api() -> None:
    assert read_list().keys() == {api.title for api in APIS}


def test_the_document_is_current() -> None:
    message = "PYTHONPATH=tests python -m support.api_surface rewrites it"
    assert DOCUMENT.read_text() == document(), message
