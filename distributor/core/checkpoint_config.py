"""The settings of a run's checkpoints, which the driver passes to the ranks in a variable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

DEFAULT_STORAGE_PATH = "~/distributor_results"
"""The folder of the runs of `TorchTrainer` without a ``storage_path``."""
VARIABLE = "DISTRIBUTOR_TRAIN"  # the environment variable of ranks that contains the settings


def check_name(parameter: str, name: object) -> None:
    """Check that a parameter is a valid name of a folder, without slashes."""
    is_name = isinstance(name, str) and name not in ("", ".", "..")
    if not is_name or not {"/", "\0"}.isdisjoint(str(name)):
        raise ValueError(f"{parameter} must be the name of a folder, but is {name!r}.")


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """The storage of a training run, and which checkpoints it keeps."""

    storage_path: str
    name: str
    num_to_keep: int | None = None  # None for all
    score_attribute: str | None = None  # a metric; None for the age
    score_order: Literal["max", "min"] = "max"
    validates: bool = False  # whether the driver has a function that validates checkpoints

    @property
    def retention(self) -> dict[str, Any]:
        names = ("num_to_keep", "score_attribute", "score_order")
        return {name: getattr(self, name) for name in names}

    def to_variable(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> CheckpointSettings | None:
        """Read the settings of a run, by default this rank's; return None if it has no storage."""
        text = env.get(VARIABLE)
        return cls(**json.loads(text)) if text else None
