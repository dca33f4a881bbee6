"""The model of `predict` on a GPU, as a task of Spark has it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.cuda import device_type, needs_gpu

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = needs_gpu


def load() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def test_a_model_that_workers_share_predicts_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    pa = pytest.importorskip("pyarrow")
    from distributor.data.outputs import to_arrow
    from distributor.data.prediction_task import Model, Prediction
    from distributor.data.tensors import TensorOptions

    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    prediction = Prediction(
        key="linear",
        functions=cloudpickle.dumps([load, None, None]),
        modules=None,
        names=["x"],
        columns="x",
        keep=[],
        default="y",
        outputs=pa.schema([("y", pa.list_(pa.float32()))]),
        batch_size=64,
        device=None,
        options=TensorOptions(),
    )
    batch = torch.rand(64, 3)
    for _ in range(2):  # the one that loads it, and another worker
        found = Model(prediction, device_type(), 1).outputs(batch)["y"]
        assert found.device.type == device_type()
        column = to_arrow(found, prediction.outputs.field("y").type, 64, "y")
        expected = load()(batch).detach()
        torch.testing.assert_close(torch.tensor(column.to_pylist()), expected)
    assert (tmp_path / "distributor-models" / "linear").stat().st_size, "it is shared"
