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


def requirements(*extras: str) -> dict[str, str]:
    """Return the versions that setup.cfg accepts, such as ">=2.4", without and with extras."""
    found = setup_cfg()
    texts = [found["options"]["install_requires"]]
    texts += [found["options.extras_require"][extra] for extra in extras]
    lines = re.findall(r"^([\w-]+)(?:\[\w+\])?(.*)$", "".join(texts), re.MULTILINE)
    return dict(lines)


def load_yaml(path: Path) -> Any:
    """Return what a file of YAML has; a test is skipped without a parser."""
    yaml: Any = pytest.importorskip("yaml")
    return yaml.safe_load(path.read_text())


def load_all_yaml(path: Path) -> list[Any]:
    """Return the documents of a file of YAML; a test is skipped without a parser."""
    yaml: Any = pytest.importorskip("yaml")
    return list(yaml.safe_load_all(path.read_text()))
