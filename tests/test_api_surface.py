"""Names, signatures and members are those of the APIs that the package follows, or listed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.api_surface import APIS, DOCUMENT, Api, document, why_not_compared

pytestmark = pytest.mark.repository


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


def test_the_document_is_current() -> None:
    message = "PYTHONPATH=tests python -m support.api_surface rewrites it"
    assert DOCUMENT.read_text() == document(), message
