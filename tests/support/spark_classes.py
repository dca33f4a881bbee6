"""Archive the classes that Spark loads, so that each JVM that the tests start takes less CPU time.

``python -m support.spark_classes FILE`` runs Spark in a JVM that writes what it has loaded to a
file as it exits (application class-data sharing). A JVM started with
``-XX:SharedArchiveFile=FILE`` maps these classes into memory instead of reading and verifying
them. It ignores an archive that another Java has made, or one for other jars.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PROGRAM = """
from pyspark.sql import SparkSession
from conftest import has_connect

builder = SparkSession.builder.config("spark.ui.enabled", "false")
if has_connect():
    builder.config("spark.plugins", "org.apache.spark.sql.connect.SparkConnectPlugin")
    builder.config("spark.connect.grpc.binding.port", "0")
for master in ("local[2]", "local-cluster[1,1,1024]"):
    session = builder.master(master).getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    session.sparkContext.parallelize([1], 1).barrier().mapPartitions(lambda rows: rows).collect()
    session.range(3).count()
    session.stop()
"""


def archive(file: Path) -> None:
    """Write the archive, or an empty file if there is no Java."""
    aside = file.with_suffix(".new")
    aside.unlink(missing_ok=True)
    if shutil.which("java") is None:
        aside.touch()
    else:
        _run_spark(f"-XX:ArchiveClassesAtExit={aside}")
    aside.replace(file)


def _run_spark(java_options: str) -> None:
    arguments = f"--driver-java-options {java_options} pyspark-shell"
    subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYSPARK_SUBMIT_ARGS": arguments},
        capture_output=True,  # which waits for the JVM too: it outlives the program
        check=True,
    )


if __name__ == "__main__":
    archive(Path(sys.argv[1]).absolute())
