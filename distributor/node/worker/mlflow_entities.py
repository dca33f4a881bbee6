"""MLflow's entities for what exists in a rank alone, and not on any server."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

NOWHERE = "distributor-nowhere"
"""The scheme of the addresses of artifacts that are not stored."""


def make_run(run_id: str, experiment_id: str = "0") -> Any:
    """Return a running run that has no parameters, metrics or tags."""
    entities: Any = import_module("mlflow.entities")
    info = entities.RunInfo(
        run_id=run_id,
        experiment_id=experiment_id,
        user_id="",
        status="RUNNING",
        start_time=_now(),
        end_time=None,
        lifecycle_stage="active",
        artifact_uri=f"{NOWHERE}:/{run_id}",
        run_name=run_id,
    )
    return entities.Run(info, entities.RunData())


def make_experiment(experiment_id: str, name: str) -> Any:
    """Return an experiment."""
    entities: Any = import_module("mlflow.entities")
    return entities.Experiment(experiment_id, name, f"{NOWHERE}:/{experiment_id}", "active")


def make_logged_model(
    model_id: str,
    experiment_id: str = "0",
    name: str | None = None,
    source_run_id: str | None = None,
    *_: Any,
    **__: Any,
) -> Any:
    """Return a model that is logged nowhere; further arguments of MLflow's method are ignored."""
    entities: Any = import_module("mlflow.entities")
    uri, now = f"{NOWHERE}:/{model_id}", _now()
    return entities.LoggedModel(
        experiment_id, model_id, name or model_id, uri, now, now, source_run_id=source_run_id
    )


def make_registered_model(name: str) -> Any:
    """Return a registered model."""
    return import_module("mlflow.entities.model_registry").RegisteredModel(name)


def make_model_version(name: str) -> Any:
    """Return version 0 of a registered model."""
    return import_module("mlflow.entities.model_registry").ModelVersion(name, "0", _now())


def _now() -> int:
    return int(time.time() * 1000)
