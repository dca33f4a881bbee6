"""Canaries for what `distributor._compat.lightning` uses of Lightning."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from support.canary import relies_on

from distributor._compat import lightning as private

pytestmark = pytest.mark.repository

if find_spec("lightning") is None:
    pytest.skip("Lightning is not installed", allow_module_level=True)


@pytest.fixture
def second_of_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    nodes = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a-run"}
    for name, value in {**identity, **nodes}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("second_of_two_nodes")
@pytest.mark.parametrize("name", private.CONNECTORS)
def test_devices_are_chosen_by_a_class_with_these_arguments(name: str) -> None:
    if find_spec(name.partition(".")[0]) is None:
        pytest.skip("this package is not installed")
    class_name = private.CONNECTORS[name]
    with relies_on("lightning", class_name, "lightning.see_all_ranks"):
        connector: Any = type(class_name, (getattr(importlib.import_module(name), class_name),), {})
        module: Any = SimpleNamespace(__name__=name, **{class_name: connector})
        private.see_all_ranks(module, uses_gpus=False)
        for asked in ({}, {"accelerator": "cpu"}, {"strategy": "ddp"}):
            strategy = connector(**asked).strategy
            assert (type(strategy).__name__, strategy.root_device.type) == ("DDPStrategy", "cpu")
            assert strategy.distributed_sampler_kwargs["num_replicas"] == 2
        alone: list[dict[str, Any]] = [{"devices": 1}]
        alone += [{"strategy": "single_device"}] if class_name == "_AcceleratorConnector" else []
        for asked in alone:
            strategy = connector(accelerator="cpu", **asked).strategy
            assert type(strategy).__name__ == "SingleDeviceStrategy"
