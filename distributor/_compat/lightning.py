"""The private API of Lightning by which a ``Trainer`` or ``Fabric`` chooses its devices."""

from __future__ import annotations

import inspect
import os
from types import ModuleType
from typing import Any

from distributor._compat import replacing

# The class that chooses the devices, by its module.
CONNECTORS = {
    "lightning.fabric.connector": "_Connector",
    "lightning_fabric.connector": "_Connector",
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "pytorch_lightning.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
}


def see_all_ranks(module: ModuleType, uses_gpus: bool) -> None:
    """Have a ``Trainer`` or ``Fabric`` train on all ranks unless its program says otherwise."""
    # By default, Lightning counts the GPUs of this machine, and one CPU: on CPUs, and with one GPU
    # on each of several machines, each rank would train a model of its own.
    connector = getattr(module, CONNECTORS[module.__name__])
    signature = inspect.signature(connector.__init__)

    @replacing(connector, "__init__")
    def initialize_with_all(initialize: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        asked = call.arguments
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            if asked["accelerator"] == "auto" and not uses_gpus:
                asked["accelerator"] = "cpu"
            is_open = asked["devices"] == "auto" and asked["num_nodes"] == 1
            names_strategy = isinstance(asked["strategy"], str)
            if is_open and names_strategy and not asked["strategy"].startswith("single_"):
                asked["devices"] = int(os.environ["LOCAL_WORLD_SIZE"])
                asked["num_nodes"] = int(os.environ["GROUP_WORLD_SIZE"])
        initialize(*call.args, **call.kwargs)
