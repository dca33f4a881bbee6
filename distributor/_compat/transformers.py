"""The private API of Transformers by which arguments keep a view of the process that made them."""

from __future__ import annotations

import dataclasses
from typing import Any

_VIEW = {"_setup_devices", "__cached__setup_devices", "_n_gpu", "distributed_state"}
"""The attributes of ``TrainingArguments`` that say which of how many processes this one is."""


def init_arguments(arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return from what ``TrainingArguments`` can be made anew, but not their view of processes."""
    names = {field.name for field in dataclasses.fields(arguments) if field.init}
    attributes = {name: value for name, value in vars(arguments).items() if name not in _VIEW}
    taken = {name: attributes.pop(name) for name in names & attributes.keys()}
    return taken, attributes
