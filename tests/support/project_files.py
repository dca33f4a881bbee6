"""Files of the project that are data: setup.cfg, and YAML."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest

from support.pages import ROOT


def setup_cfg() -> ConfigParser:
    """Return what setup.cfg has."""
    found = ConfigParser()
    found.read(ROOT / "setup.cfg")
    return found


def requirements() -> dict[str, str]:
    """Return the versions of each package that setup.cfg accepts, such as ">=2.4"."""
    lines = setup_cfg()["options"]["install_requires"].split()
    return dict(re.fullmatch(r"([\w-]+)(.*)", line).groups() for line in lines)  # type: ignore[union-attr]


def load_yaml(path: Path) -> Any:
    """Return what a file of YAML has; a test is skipped without a parser."""
    yaml: Any = pytest.importorskip("yaml")
    return yaml.safe_load(path.read_text())
