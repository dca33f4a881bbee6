"""The environment variables by which the driver configures MLflow in ranks, and their values."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

RUN_ID = "MLFLOW_RUN_ID"  # MLflow's own variable; it names the job's run
LOGGING_RANKS = "DISTRIBUTOR_MLFLOW_RANKS"  # the ranks that log: one of the four values that follow
# What rank 0 prints if it uses MLflow although nothing is logged; empty if the driver warned.
OFF_REASON = "DISTRIBUTOR_MLFLOW_NOTE"

FIRST, ALL = "first", "all"
# The job has no run. Rank 0 logs to a server that its own code or variables name.
NAMED_SERVER = "named"
NO_RANK = "none"  # nothing is logged, whatever address the code names

THREADS_VARIABLE = "OMP_NUM_THREADS"

# Limits for ranks that the user has not set: MLflow's own hold training up for minutes.
HTTP_DEFAULTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
# The reason that rank 0 prints if the driver passed none.
USE_NOT_DETECTED = (
    "MLflow is off: no use of it was detected on the driver, so there is no run to log to. Set "
    "MLFLOW_TRACKING_URI on the driver, or import mlflow in the training function or script itself."
)

# Prefixes of addresses of stores that exist only on the machine that uses them.
LOCAL_STORES = ("sqlite:", "file:", "/", ".")
# Error codes of MLflow for which its server, and not the caller, is responsible.
SERVER_ERRORS = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")


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
