"""Files for contributors: what they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"

pytestmark = [
    pytest.mark.repository,
    pytest.mark.skipif(not CONTRIBUTING.exists(), reason="not in a checkout"),
]


def test_contributing_names_targets_and_files_that_exist() -> None:
    text = CONTRIBUTING.read_text()
    targets = set(re.findall(r"`?make ([a-z0-9-]+)", text))
    assert {"venv", "lint", "test", "test-all"} <= targets
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in targets if f"\n{name}:" not in makefile] == []
    paths = re.findall(r"(?:distributor|tests|conf|launch)/[\w./-]*\w", text)
    assert len(paths) > 10
    roots = (ROOT, ROOT / "distributor")
    assert [path for path in paths if not any((root / path).exists() for root in roots)] == []


def test_the_layout_has_every_folder_of_the_package() -> None:
    layout = (ROOT / "ARCHITECTURE.md").read_text().partition("\n## Layout\n")[2].split("```")[1]
    folders = {path.parent.name for path in (ROOT / "distributor").glob("*/__init__.py")}
    assert len(folders) > 10
    assert folders - set(re.findall(r"(\w+)/", layout)) == set()
