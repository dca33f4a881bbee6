"""The environment variables by which the driver configures MLflow in ranks, and their values."""

from __future__ import annotations

RUN_ID = "MLFLOW_RUN_ID"  # MLflow's own variable; it names the job's run
LOGGING_RANKS = "DISTRIBUTOR_MLFLOW_RANKS"  # the ranks that log: one of the four values that follow
# What rank 0 prints if it uses MLflow although nothing is logged; empty if the driver warned.
OFF_REASON = "DISTRIBUTOR_MLFLOW_NOTE"

FIRST, ALL = "first", "all"
# The job has no run. Rank 0 logs to a server that its own code or variables name.
NAMED_SERVER = "named"
NO_RANK = "none"  # nothing is logged, whatever address the code names

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
