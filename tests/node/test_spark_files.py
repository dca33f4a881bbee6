"""Ranks find the files that the driver has sent with ``SparkContext.addFile``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distributor import TorchDistributor


@pytest.mark.spark
def test_a_file_that_spark_has_sent(spark: Any, tmp_path: Path) -> None:
    def read(name: str) -> str:
        from pyspark import SparkFiles

        with open(SparkFiles.get(name)) as file:
            return file.read()

    path = tmp_path / "words.txt"
    path.write_text("a b c")
    spark.sparkContext.addFile(str(path))
    distributor = TorchDistributor(2, local_mode=False, use_gpu=False)
    assert distributor.run_all(read, path.name) == ["a b c"] * 2
