"""Studies of Optuna whose trials are runs of one rank or many, on this machine or on Spark.

Optuna's studies, samplers, pruners and storages are used as they are: https://optuna.org.
"""

from __future__ import annotations

import re
from typing import NoReturn

from distributor.core.versions import require_optuna

require_optuna("distributor.tune")

from distributor.tune.study import optimize
from distributor.unsupported import TUNE_INSTEAD, refuse_modules

__all__ = ["optimize"]
refuse_modules()
_OF_RAY_TUNE = re.compile(
    "CLIReporter|Callback|Checkpoint(Config)?|Experiment(Analysis)?|FailureConfig|"
    "JupyterNotebookReporter|PlacementGroupFactory|ProgressReporter|Result(Grid)?|ResumeConfig|"
    "RunConfig|Stopper|SyncConfig|Trainable|Tune(Config|Context|Error|r)|choice|"
    "create_(scheduler|searcher)|get_(checkpoint|context)|grid_search|q?lograndint|q?loguniform|"
    "q?randint|q?randn|q?uniform|register_(env|trainable)|report|run(_experiments)?|sample_from|"
    "with_(parameters|resources)"
)


def __getattr__(name: str) -> NoReturn:
    if _OF_RAY_TUNE.fullmatch(name):
        raise NotImplementedError(f"distributor.tune.{name}: {TUNE_INSTEAD}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
