"""Canaries for what `distributor._compat.huggingface` uses of Transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.canary import relies_on

from distributor._compat import huggingface as private

pytestmark = pytest.mark.repository


def test_arguments_are_made_anew_without_their_view_of_the_processes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")  # here: each process collects all tests
    kind = transformers.TrainingArguments
    given = kind(str(tmp_path), use_cpu=True, learning_rate=0.5, report_to="none", seed=3)
    given.note = "of the program's own"
    assert given.device.type == "cpu"
    what = "the attributes of TrainingArguments that depend on the process"
    with relies_on("transformers", what, "huggingface.training_arguments"):
        taken, others = private.training_arguments(given)
        again = kind(**taken)
        assert again.to_dict() == given.to_dict()
        view = vars(again).keys() - kind.__dataclass_fields__.keys()
        assert {"_setup_devices", "_n_gpu", "distributed_state"} <= view
        assert others.pop("note") == "of the program's own"
        assert not any("PartialState" in type(value).__name__ for value in others.values())
        assert not {name for name in others if "device" in name or "gpu" in name}
