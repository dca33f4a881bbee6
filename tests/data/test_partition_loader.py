"""The data loader of PySpark's distributor, beside the original."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.ml.linalg import Vectors
from pyspark.ml.torch.distributor import TorchDistributor as PySparks

from distributor import TorchDistributor
from distributor._compat.pyspark import python_executable
from distributor.torch_distributor import get_spark_partition_data_loader

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("restored_loggers")]


def frame(spark: Any) -> Any:
    """Return a DataFrame of two partitions of three rows."""
    rows = [
        (
            i,
            i + 0.5,
            [float(i), 1.0],
            Vectors.dense([i, 2.0]) if i % 2 else Vectors.sparse(2, {1: i}),
        )
        for i in range(6)
    ]
    made = spark.createDataFrame(rows, ["id", "x", "floats", "v"]).selectExpr(
        "id", "float(x) AS x", "cast(floats AS array<float>) AS floats", "v"
    )
    return made.repartitionByRange(2, "id").sortWithinPartitions("id")


def load(loader: Callable[..., Any], num_samples: int, num_workers: int) -> list[Any]:
    batches = loader(num_samples, batch_size=2, num_workers=num_workers)
    return [[(column.dtype, column.tolist()) for column in batch] for batch in batches]


def load_pysparks() -> list[Any]:
    from pyspark.ml.torch.distributor import _get_spark_partition_data_loader as loader

    return load(loader, 5, 0)


@pytest.mark.slow
def test_the_batches_are_pysparks(spark: Any) -> None:
    """More rows than there are in a partition, which are then repeated; columns of any name."""
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # PySpark's class sends no modules
    theirs = PySparks(2, local_mode=False, use_gpu=False)
    ours = TorchDistributor(2, local_mode=False, use_gpu=False)
    with python_executable(spark.sparkContext, sys.executable):
        expected = theirs._train_on_dataframe(load_pysparks, frame(spark))
    odd = frame(spark).toDF("a.b", "*", "v", "V")  # PySpark's own loader fails
    for rows in (frame(spark), odd):
        found = ours._train_on_dataframe(lambda: load(get_spark_partition_data_loader, 5, 0), rows)
        assert found == expected
    assert [len(batch[0][1]) for batch in found] == [2, 2, 1]


def test_a_process_loads_the_rows_of_a_partition(spark: Any) -> None:
    ranks = TorchDistributor(2, local_mode=False, use_gpu=False)
    rows = spark.range(0, 6, 1, 2)
    [[(_, [one, other])]] = ranks.train_on_dataframe(
        lambda loader: load(loader, 2, 1), rows, get_spark_partition_data_loader
    )
    assert other == one + 1
    with pytest.raises(ValueError, match="does not support the type bool of column 'flag'"):
        ranks.train_on_dataframe(
            get_spark_partition_data_loader, rows.selectExpr("id > 1 AS flag"), 2, 2
        )


def test_outside_such_a_run_there_is_no_loader(spark: Any) -> None:
    with pytest.raises(RuntimeError, match="only available in the ranks of the run"):
        get_spark_partition_data_loader(2, 2)
    for kind in (PySparks, TorchDistributor):
        with pytest.raises(ValueError, match="local_mode to False"):
            kind(2, local_mode=True, use_gpu=False)._train_on_dataframe(print, spark.range(2))
