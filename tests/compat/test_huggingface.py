"""A canary for what `distributor._compat.huggingface` uses of Accelerate."""

from __future__ import annotations

from typing import Any

import pytest
from support.canary import relies_on
from torch.utils.data import DataLoader

from distributor._compat import huggingface as private

pytestmark = pytest.mark.repository


def test_a_marked_loader_is_not_prepared_again() -> None:
    accelerate: Any = pytest.importorskip("accelerate")  # here: each process collects all tests
    accelerator = accelerate.Accelerator(cpu=True)
    plain, marked = (DataLoader([1, 2, 3, 4]) for _ in range(2))  # type: ignore[arg-type]
    private.mark_as_prepared(marked)
    assert accelerator.prepare(plain) is not plain
    with relies_on("accelerate", "the mark of prepared objects", "huggingface.mark_as_prepared"):
        assert accelerator.prepare(marked) is marked
