#!/bin/bash
# Installs distributor on each node of a Databricks cluster, in the Python of its notebooks. A
# cluster-scoped init script, in the same volume as the wheel: SETUP, which cluster.json sets, is
# their folder. A Runtime for Machine Learning has torch, pandas and pyarrow.
# Never run on Databricks: bash -n and shellcheck only.
set -euo pipefail
/databricks/python/bin/python -m pip install --no-cache-dir "$SETUP"/torch_spark_distributor-*.whl
