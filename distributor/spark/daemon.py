"""The parent of Spark's Python workers, which imports torch before it forks them.

With ``spark.python.daemon.module=distributor.spark.daemon``, an executor imports torch once, and
its workers share that memory. The package must be installed on the executors.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys

from distributor._compat.pyspark import serve_workers

IMPORTS = ("pandas", "pyarrow.parquet", "pyspark.sql.pandas.serializers", "torch")
"""What tasks with Arrow data and a model import."""


def main() -> None:
    """Import what workers need, and fork them as PySpark's own daemon does."""
    # Spark reads the daemon's port from its standard output.
    with contextlib.redirect_stdout(sys.stderr):
        for name in IMPORTS:
            with contextlib.suppress(ImportError):  # as in an executor's own environment
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or each worker's garbage collector would copy the pages that they share
    serve_workers()


if __name__ == "__main__":
    main()
