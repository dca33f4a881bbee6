"""MLflow in a rank: the job's one run, logged to by the ranks that may, ended by the driver alone.

MLflow attaches to the run that the environment names by itself. What is changed here, once it is
imported: ranks that may not log do not, a server that cannot be had costs a message and not the
training, and no rank's end, nor a ``with mlflow.start_run()`` in it, ends the run.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from distributor.node.import_hooks import after_import
from distributor.wire.wording import counted

Change = Callable[[Callable[..., Any]], Callable[..., Any]]
RUN, RANKS = "MLFLOW_RUN_ID", "DISTRIBUTOR_MLFLOW_RANKS"
"""The variables that name the run, and the ranks that log: "first" or "all"."""
FLUENT_WRITES = (
    "delete_tag",
    "log_artifact",
    "log_artifacts",
    "log_dict",
    "log_figure",
    "log_image",
    "log_input",
    "log_inputs",
    "log_metric",
    "log_metrics",
    "log_outputs",
    "log_param",
    "log_params",
    "log_stream",
    "log_table",
    "log_text",
    "set_tag",
    "set_tags",
)
CLIENT_WRITES = (*FLUENT_WRITES, "log_batch")
SERVERS_FAULTS = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")


def follow_run() -> None:
    """Have MLflow, once this rank imports it, keep to the job's run, where there is one."""
    if RUN not in os.environ or RANKS not in os.environ:
        return
    logs = os.environ[RANKS] == "all" or os.environ["RANK"] == "0"
    after: dict[str, Callable[[ModuleType], object]] = {
        "mlflow.tracking.fluent": functools.partial(_adapt, os.environ[RUN], logs),
    }
    if not logs:
        after["mlflow.models.model"] = _log_no_models
    for name, change in after.items():
        after_import(name, change)


def _adapt(run_id: str, logs: bool, fluent: ModuleType) -> None:
    atexit.unregister(fluent._safe_end_run)
    client: Any = fluent.MlflowClient
    client.set_terminated = _unless(run_id, client.set_terminated)
    write = _forgiving(_Complaint()) if logs else _silent
    changes = {**dict.fromkeys(FLUENT_WRITES, write), "start_run": _again(run_id, fluent)}
    for module in (fluent, sys.modules.get("mlflow")):
        _change_all(module, changes)
    if not logs:
        _change_all(client, dict.fromkeys(CLIENT_WRITES, _silent))


def _change_all(owner: Any, changes: Mapping[str, Change]) -> None:
    """Replace functions of a module or class, as far as it has them."""
    for name, change in changes.items():
        if hasattr(owner, name):
            setattr(owner, name, change(getattr(owner, name)))


def _log_no_models(module: Any) -> None:
    module.Model.log = classmethod(lambda cls, *args, **kwargs: None)


def _again(run_id: str, fluent: Any) -> Change:
    """Have every start attach to the job's run: MLflow forgets it after the first."""

    def change(start_run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(start_run)
        def attach(*args: Any, **kwargs: Any) -> Any:
            if fluent.active_run() is None:
                os.environ[RUN] = run_id
            return start_run(*args, **kwargs)

        return attach

    return change


def _unless(run_id: str, end: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(end)
    def end_another(self: Any, ended: str, *args: Any, **kwargs: Any) -> Any:
        return None if ended == run_id else end(self, ended, *args, **kwargs)

    return end_another


def _silent(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def pass_over(*args: Any, **kwargs: Any) -> None:
        return None

    return pass_over


class _Complaint:
    """What is said of a server that cannot be had: once, and how much was lost at the end."""

    def __init__(self) -> None:
        self._lost = 0

    def hear(self, error: Exception) -> None:
        if not self._lost:
            print(
                f"distributor: MLflow's server did not take what was logged: {error}. Training "
                "goes on.",
                file=sys.stderr,
            )
            atexit.register(self._tell)
        self._lost += 1

    def _tell(self) -> None:
        lost = counted(self._lost, "call")
        print(f"distributor: {lost} did not reach MLflow.", file=sys.stderr)


def _forgiving(complaint: _Complaint) -> Change:
    def change(write: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(write)
        def try_to(*args: Any, **kwargs: Any) -> Any:
            try:
                return write(*args, **kwargs)
            except Exception as error:
                if getattr(error, "error_code", None) not in SERVERS_FAULTS:
                    raise
                complaint.hear(error)

        return try_to

    return change
