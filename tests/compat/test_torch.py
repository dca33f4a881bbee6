"""A canary for what `distributor._compat.torch` uses of torch that no other test would notice."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.canary import relies_on

from distributor._compat import torch as private

pytestmark = pytest.mark.repository

PROGRAM = """
import sys, torch
parameter = torch.nn.Parameter(torch.ones(1))
before = set(sys.modules)
torch.optim.SGD([parameter], lr=1.0)
print(*set(sys.modules) - before)
"""


def test_an_optimizer_imports_what_is_preloaded() -> None:
    with relies_on("torch", "what the first optimizer imports", "torch.OPTIMIZER_IMPORTS"):
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        assert set(private.OPTIMIZER_IMPORTS) <= set(done.stdout.split())
