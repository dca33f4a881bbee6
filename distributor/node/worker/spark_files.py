"""Files that `SparkContext.addFile` has sent are found in ranks, as in Spark's own functions."""

from __future__ import annotations

import os
from functools import partial

from distributor._compat import pyspark as private
from distributor.rank.import_hooks import after_import

VARIABLE = "DISTRIBUTOR_SPARK_FILES"
"""The variable of a rank on an executor that has the folder of these files."""


def find_spark_files() -> None:
    """Have ``SparkFiles`` know the executor's folder, if this rank is on an executor."""
    if folder := os.environ.get(VARIABLE):
        for name in private.MODULES_OF_SPARK_FILES:
            after_import(name, partial(private.find_spark_files, folder=folder))
