"""Canaries for what `distributor._compat.accelerate` uses of Accelerate."""

from __future__ import annotations

import pytest
from support.canary import relies_on
from torch.utils.data import DataLoader

from distributor._compat import accelerate as private

accelerate = pytest.importorskip("accelerate")


def test_a_marked_loader_is_not_prepared_again() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    plain, marked = (DataLoader([1, 2, 3, 4]) for _ in range(2))
    private.mark_as_prepared(marked)
    assert accelerator.prepare(plain) is not plain
    with relies_on("accelerate", "the mark of prepared objects", "accelerate.mark_as_prepared"):
        assert accelerator.prepare(marked) is marked
